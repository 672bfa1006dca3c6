"""The state of optimizers by the names of parameters, as the C++ library saves that of its own."""

from __future__ import annotations

from typing import Any

import torch

from lockstep import _C
from lockstep.errors import UsageError
from lockstep.group import Group

# The options that the C++ library has, and saves, of torch's optimizers.
_OF_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad")
_OPTIONS = {
    "Adam": _OF_ADAM,
    "AdamW": _OF_ADAM,
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered"),
    "Adagrad": ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
}

Names = dict[int, str]  # by id()
_TENSOR = "lockstep.tensor"  # in the place of a tensor, its number, shape and dtype


def names_of(optimizer: torch.optim.Optimizer, module: torch.nn.Module | None) -> Names:
    """The names of the parameters of an optimizer of torch."""
    kind = type(optimizer).__name__
    if kind not in _OPTIONS or not isinstance(optimizer, getattr(torch.optim, kind)):
        raise UsageError(
            f"the state of a {kind} cannot be saved; expected torch's {', '.join(_OPTIONS)}",
            hint="pass an object whose state_dict() has numbers, strings and tensors",
        )
    if module is None:
        raise UsageError(
            "an optimizer of torch needs the module that names its parameters: add(name, optimizer, module)"
        )
    names = {id(p): name for name, p in module.named_parameters()}
    if any(id(p) not in names for p in parameters_of(optimizer)):
        raise UsageError("the optimizer has a parameter that the module does not have")
    return names


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of all groups, in their order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The numbers of each parameter group, such as "group.0.lr"."""
    options: dict[str, Any] = {}
    allowed = _OPTIONS.get(type(optimizer).__name__)
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name == "params" or (allowed is not None and name not in allowed) or value is None:
                continue
            prefix = f"group.{index}.{name}"
            if name == "betas":
                options[f"{prefix}.0"], options[f"{prefix}.1"] = map(float, value)
            elif isinstance(value, bool):
                options[prefix] = value
            elif isinstance(value, (int, float, torch.Tensor)):
                options[prefix] = float(value)
    return options


def load_options(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Sets the options that options_of() has returned."""
    for index, group in enumerate(optimizer.param_groups):
        for name in list(group):
            prefix = f"group.{index}.{name}"
            if f"{prefix}.0" in saved:
                group[name] = (saved[f"{prefix}.0"], saved[f"{prefix}.1"])
            elif prefix not in saved:
                continue
            elif isinstance(group[name], torch.Tensor):
                group[name].fill_(saved[prefix])
            else:
                group[name] = saved[prefix]


def state_of(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    """The state, such as "fc.weight.exp_avg", and the options."""
    state = options_of(optimizer)
    for p in parameters_of(optimizer):
        for key, value in optimizer.state.get(p, {}).items():
            if key == "step" or isinstance(value, torch.Tensor):
                state[f"{names[id(p)]}.{key}"] = int(value) if key == "step" else value
    return state


def load(optimizer: torch.optim.Optimizer, names: Names, saved: dict[str, Any]) -> None:
    """Loads what state_of() has returned. Raises UsageError, and changes nothing, for state that does not fit."""
    known = set(options_of(optimizer))
    missing = sorted(known - set(saved))
    if missing:
        raise UsageError(f'the state has no value "{missing[0]}"', cause="BAD_FILE")
    state: dict[int, dict[str, Any]] = {}
    for number, p in enumerate(parameters_of(optimizer)):
        own: dict[str, Any] = {}
        for name, value in saved.items():
            parameter, _, key = name.rpartition(".")
            if parameter != names[id(p)]:
                continue
            if isinstance(value, torch.Tensor) and value.shape != p.shape:
                raise UsageError(f'the state\'s tensor "{name}" has another shape', cause="BAD_FILE")
            own[key] = value
            known.add(name)
        if "step" in own:
            own["step"] = torch.tensor(float(own["step"]))
        if own:
            state[number] = own
    unknown = sorted(set(saved) - known)
    if unknown:
        raise UsageError(f'the state has the value "{unknown[0]}", which the optimizer does not have', cause="BAD_FILE")
    packed = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": packed})
    load_options(optimizer, saved)


def broadcast(optimizer: torch.optim.Optimizer, group: Group, root: int) -> None:
    """Gives all ranks rank `root`'s state and options of `optimizer`. Collective."""
    tensors: list[torch.Tensor] = []

    def without_tensors(value: Any) -> Any:
        if torch.is_tensor(value):
            tensors.append(value.detach().cpu())  # as the other ranks receive them; loading moves them
            return {_TENSOR: [len(tensors) - 1, list(value.shape), str(value.dtype).removeprefix("torch.")]}
        if isinstance(value, dict):
            return {key: without_tensors(entry) for key, entry in value.items()}
        return type(value)(map(without_tensors, value)) if type(value) in (list, tuple) else value

    def with_tensors(value: Any) -> Any:
        if isinstance(value, dict) and _TENSOR in value:
            index, shape, dtype = value[_TENSOR]
            tensors.extend([torch.empty(0)] * (index + 1 - len(tensors)))
            tensors[index] = torch.empty(shape, dtype=getattr(torch, dtype))
            return tensors[index]
        if isinstance(value, dict):
            return {key: with_tensors(entry) for key, entry in value.items()}
        return type(value)(map(with_tensors, value)) if type(value) in (list, tuple) else value

    is_root = group.rank == root
    sent = without_tensors(optimizer.state_dict()) if is_root else None
    plain = group.broadcast_object(sent, root, name="optimizer state")
    state = None if is_root else with_tensors(plain)
    _C.broadcast_tensors([("optimizer state", tensor) for tensor in tensors], group._group, root)
    if not is_root:
        optimizer.load_state_dict(state)
