"""Optimizers that update each parameter once per host, in the pass that reads all ranks' gradients.

Each behaves like torch.optim's optimizer of that name and computes the same values within rounding. It is constructed
from a DistributedDataParallel and takes all of its parameters. Where all ranks are on one host, they share one copy of
parameters and state, and after backward() `p.grad` is this rank's own gradient: the mean is never stored, unless
average_gradients() is called. torch.nn.utils.clip_grad_norm_() and clip_grad_value_(), and torch.amp.GradScaler, call
it by themselves; clip_grad_norm() of the optimizer is faster.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypedDict

import torch
from typing_extensions import Unpack  # a requirement of torch

from lockstep import _C, _engine, _failures, _optimizer_patches
from lockstep._optimizer_state import parameters_of
from lockstep.ddp import DistributedDataParallel
from lockstep.errors import UsageError

_optimizers: weakref.WeakSet = weakref.WeakSet()


def _without_import(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch's `method` without the import of torch._dynamo (0.5 s, 70 MB in each rank) that its first call
    makes, unless the program itself has imported that."""
    plain = inspect.unwrap(method)

    @functools.wraps(plain)
    def call(*args: Any, **options: Any) -> Any:
        return (method if "torch._dynamo" in sys.modules else plain)(*args, **options)

    return call


def _unless_none(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


class Options(TypedDict, total=False):
    """Arguments that all optimizers of this module have in addition to those of torch.optim.

    Attributes:
        groups: [{"params": [...], "lr": ...}, ...], parameters with options of their own.
        shard_state: each rank keeps the state of its part of the elements, where ranks do not share it (ZeRO stage 1).
        foreach: uses torch's operations on lists of tensors; always so on GPUs.
        average_in_backward: each p.grad is the mean over all ranks when backward() returns, for programs that read or
            change gradients; costs about the time that the fused update saves.
    """

    groups: Sequence[dict[str, Any]]
    shard_state: bool
    foreach: bool
    average_in_backward: bool


class _State(dict):
    """Stands for the `state` of an optimizer of torch: empty, and not to be changed."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise UsageError(
            "lockstep.optim: the optimizer's `state` was used; it is not kept there",
            hint="read state_dict()['state'], and write with load_state_dict(); to clear it, load "
            "{'state': {}, 'param_groups': optimizer.state_dict()['param_groups']}",
        )

    __missing__ = __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


class FusedOptimizer(torch.optim.Optimizer):
    """The base class of all optimizers of this module."""

    _CLOSE_ORDER = 0
    _state = _State()
    _complete = False
    _add_param_group = _without_import(torch.optim.Optimizer.add_param_group)
    zero_grad = _without_import(torch.optim.Optimizer.zero_grad)

    def __init__(
        self,
        ddp: DistributedDataParallel,
        defaults: dict[str, Any],
        *,
        groups: Sequence[dict[str, Any]] = (),
        shard_state: bool = False,
        foreach: bool = False,
        average_in_backward: bool = False,
    ) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise self._error(
                f"the first argument is a {type(ddp).__qualname__}; expected a lockstep.DistributedDataParallel, of "
                "which the optimizer takes all parameters",
                hint="use torch.optim for parameters of no DistributedDataParallel",
            )
        _optimizer_patches.install(_optimizers)
        self._ddp = ddp
        self._names = {id(p): name for name, p in ddp.module.named_parameters() if name not in ddp._ignored}
        groups = [{**group, "params": list(group["params"])} for group in groups]
        listed = {id(p) for group in groups for p in group["params"]}
        others = [
            p
            for p in ddp.module.parameters()
            if id(p) in self._names and id(p) not in listed and (p.is_floating_point() or p.is_complex())
        ]
        first = [{"params": others}] if others else []
        super().__init__([*first, *groups], defaults)
        self._complete = True
        in_shared_memory = [self._names.get(id(p), "") for p in parameters_of(self) if p.is_cpu and p.is_shared()]
        self._written = [self._options(group) for group in self.param_groups]
        self._optimizer: Any = getattr(_C, f"make_{type(self).__name__}")(
            ddp._ddp, [group["params"] for group in self.param_groups], self._written, len(first), shard_state, foreach
        )
        if in_shared_memory and self.shares_parameters:
            raise self._error(
                f"parameter {in_shared_memory[0]} is in shared memory (share_memory()), whose readers would not see "
                "the updates, because the ranks move it to a copy that they share",
                hint=f"use torch.optim.{type(self).__name__}, or pass foreach=True",
            )
        ddp._optimizer = weakref.ref(self)
        self._averages_in_backward, self._updates_in_backward = average_in_backward, False
        self._backwards = ddp._ddp.num_backwards()
        _optimizers.add(self)
        _failures.add_owner(self)

    def _error(self, text: str, hint: str) -> UsageError:
        return UsageError(f"lockstep.optim.{type(self).__name__}: {text}", hint=hint)

    def _close(self) -> None:
        self._optimizer = None

    def _has_local_gradients(self) -> bool:
        ddp = self._ddp._ddp
        return self._optimizer is not None and ddp is not None and ddp.has_local_gradients()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._error("copied or pickled", hint="copy or save its state_dict()")

    @property
    def state(self) -> Any:
        """Empty; the state is in state_dict(). Raises UsageError if it is changed."""
        return self._state

    @state.setter
    def state(self, value: object) -> None:
        if self._complete:  # torch.optim.Optimizer makes one
            self._state._refuse()

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        """The options of a group, with numbers in the place of tensors."""
        for name in ("maximize", "differentiable"):
            if group.get(name):
                raise self._error(
                    f"a group has {name}={group[name]!r}; expected False",
                    hint="negate the loss" if name == "maximize" else "use torch.optim",
                )
        return {
            name: float(group[name]) if isinstance(group[name], torch.Tensor) else group[name] for name in self.defaults
        }

    def _write_options(self) -> None:
        """Hands options to C++ that have been changed, as schedules do."""
        for index, group in enumerate(self.param_groups):
            options = self._options(group)
            if options != self._written[index]:
                self._optimizer.set_options(index, options)
                self._written[index] = options

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UsageError: the optimizer has all parameters of its DistributedDataParallel from the beginning."""
        if self._complete:
            raise self._error(
                "add_param_group() after the optimizer was made",
                hint="pass `groups` to the constructor; for new parameters make a new DistributedDataParallel",
            )
        self._add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one update from the mean of all ranks' gradients. Collective; blocks until all ranks have called it.

        Returns what `closure`, if there is one, returned; it is called once, with gradients enabled."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._write_options()
        self._optimizer.step()
        return result

    def average_gradients(self) -> None:
        """Makes each p.grad the mean over all ranks, if backward() has not done so. Then gradients may be read, and
        changed if all ranks change them alike. Collective."""
        self._optimizer.average_gradients()

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scales gradients in the next step() so that the norm of their mean is at most `max_norm`. Returns the norm
        before. Collective. Faster than torch.nn.utils.clip_grad_norm_(), which averages and stores all gradients."""
        return self._optimizer.clip_grad_norm(float(max_norm))

    def clip_grad_value(self, max: float) -> None:
        """Clamps values of the mean gradients to [-max, max] in the next step()."""
        self._optimizer.clip_grad_value(float(max))

    def change_parameters(self, change: Callable[[], object]) -> None:
        """Calls change() once per copy of the parameters, on one of the ranks that share it; it may write parameters,
        and must not call a collective. Collective."""
        self._optimizer.change_parameters(lambda: (change(), None)[1])

    def update_in_backward(self, on: bool = True) -> None:
        """From now on, backward() updates each parameter as soon as all ranks have its gradient; step() only ends the
        step. All ranks call it alike."""
        self._optimizer.update_in_backward(on)
        self._updates_in_backward = on

    @property
    def shares_parameters(self) -> bool:
        """Whether the ranks of this host share one copy of the parameters."""
        return self._optimizer.shares_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the state in the layout of torch.optim, which an optimizer of torch.optim loads too. With
        shard_state it is collective."""
        for prepare in self._optimizer_state_dict_pre_hooks.values():
            prepare(self)
        found = self._optimizer.state_dict()
        numbers = {name: number for number, name in enumerate(self._ordered_names())}
        state: dict[int, dict[str, Any]] = {}
        for name in sorted(found, key=lambda name: numbers[name.rpartition(".")[0]]):
            parameter, _, key = name.rpartition(".")
            copied = found[name].to(torch.float32) if key == "step" else found[name].detach().clone()
            state.setdefault(numbers[parameter], {})[key] = copied
        count = itertools.count()
        groups = [{**group, "params": [next(count) for _ in group["params"]]} for group in self.param_groups]
        result: dict[str, Any] = {"state": state, "param_groups": groups}
        for change in self._optimizer_state_dict_post_hooks.values():
            result = _unless_none(change(self, result), result)
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what state_dict() of this class, or of torch.optim's optimizer of the same name, returned. All ranks
        pass the same values. Raises UsageError, and changes nothing, for state that does not fit."""
        state_dict = dict(state_dict)
        for change in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = _unless_none(change(self, state_dict), state_dict)
        groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        own = [len(group["params"]) for group in self.param_groups]
        if sizes != own:
            raise UsageError(f"load_state_dict(): groups have {sizes} parameters; expected {own}")
        names = self._ordered_names()
        numbers = [number for group in groups for number in group["params"]]
        tensors: dict[str, torch.Tensor] = {}
        for group in groups:
            self._options({**self.defaults, **group})  # raises for what this class does not support
        for place, number in enumerate(numbers):
            own_state = {key: value for key, value in state_dict["state"].get(number, {}).items() if value is not None}
            if own_state and "step" not in own_state:
                own_state["step"] = 1  # torch.optim.SGD does not count; with a momentum, the first step is over
            for key, value in own_state.items():
                value = torch.as_tensor(value)
                tensors[f"{names[place]}.{key}"] = value.to(torch.int64) if key == "step" else value
        self._optimizer.load_state_dict(tensors)
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update({key: copy.deepcopy(value) for key, value in loaded.items() if key != "params"})
        for finish in self._optimizer_load_state_dict_post_hooks.values():
            finish(self)

    def _ordered_names(self) -> list[str]:
        """The names of the parameters, in the order of their numbers in torch's layout."""
        return [self._names[id(p)] for p in parameters_of(self)]


class Adam(FusedOptimizer):
    """torch.optim.Adam. The other arguments are those of Options."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
        super().__init__(ddp, defaults, **options)


class AdamW(FusedOptimizer):
    """torch.optim.AdamW. The other arguments are those of Options."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
        super().__init__(ddp, defaults, **options)


class SGD(FusedOptimizer):
    """torch.optim.SGD. The other arguments are those of Options."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        super().__init__(ddp, defaults, **options)


class Adagrad(FusedOptimizer):
    """torch.optim.Adagrad. The other arguments are those of Options."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        **options: Unpack[Options],
    ) -> None:
        defaults = dict(
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
        )
        super().__init__(ddp, defaults, **options)


class LAMB(FusedOptimizer):
    """Adam whose step is scaled to the norm of the parameter, for batches of many thousands of samples (You et al.,
    arXiv:1904.00962, algorithm 2). `adapt`: False for biases and normalisation parameters, in a group of their own."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        bias_correction: bool = True,
        adapt: bool = True,
        **options: Unpack[Options],
    ) -> None:
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction, adapt=adapt
        )
        super().__init__(ddp, defaults, **options)


class LARS(FusedOptimizer):
    """SGD whose step is scaled to the norm of the parameter, for batches of thousands of samples (You et al.,
    arXiv:1708.03888). `adapt`: as in LAMB."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        lr: float | torch.Tensor = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        nesterov: bool = False,
        adapt: bool = True,
        **options: Unpack[Options],
    ) -> None:
        defaults = dict(
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            trust_coefficient=trust_coefficient,
            eps=eps,
            nesterov=nesterov,
            adapt=adapt,
        )
        super().__init__(ddp, defaults, **options)


def _write_before_backward() -> None:
    for optimizer in list(_optimizers):
        if optimizer._updates_in_backward and optimizer._optimizer is not None:
            optimizer._write_options()


def _average_after_backward() -> None:
    for optimizer in list(_optimizers):
        if not optimizer._averages_in_backward or optimizer._optimizer is None or optimizer._ddp._no_sync_depth > 0:
            continue
        if not optimizer._ddp._ddp.belongs_to_this_thread():
            continue
        backwards = optimizer._ddp._ddp.num_backwards()
        if backwards != optimizer._backwards:  # this one has reached its model
            optimizer._backwards = backwards
            optimizer.average_gradients()


_engine.around_backward(_write_before_backward, _average_after_backward)
