"""Saves and resumes a training: one object that gathers everything that the training consists of.

>>> state = lockstep.checkpoint.TrainingState(world, "runs/digits/checkpoints", settings={"batch_size": 64})
>>> if state.is_finished:
...     sys.exit()                                     # an earlier start has completed the training
>>> state.add("model", net).add("optimizer", optimizer, net).add("loader", loader).add_random_state()
>>> state.resume()
>>> for epoch in loader.remaining_epochs(10):
...     for x, y in loader.epoch(epoch):
...         ...
...     state.save_async(step)
>>> state.save(step, finished=True)

The files are those of training::TrainingState of the C++ library, and never contain code: a training that one of them
has saved, the other resumes.
"""

from __future__ import annotations

import collections
import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from lockstep import _C, _failures, _optimizer_state
from lockstep.ddp import DistributedDataParallel, non_persistent_buffers
from lockstep.errors import UsageError
from lockstep.group import Group
from lockstep.hooks import StatefulHook
from lockstep.host_sync import HostSync
from lockstep.optim import FusedOptimizer

__all__ = ["SaveReport", "TrainingState"]

Value: TypeAlias = bool | int | float | str | torch.Tensor
_VALUES = (bool, int, float, str, torch.Tensor)
_JSON = "json:"  # begins a string that stands for a list, a dict or None


class SaveReport(NamedTuple):
    """Attributes:
    path: of the checkpoint.
    num_bytes: size of the files of all ranks.
    stall: seconds for which the call blocked on this rank.
    duration: seconds from the call until the checkpoint was on the disk.
    """

    path: str
    num_bytes: int
    stall: float
    duration: float


def _flat(name: str, value: Any) -> Value:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (bool, int, float)) or (isinstance(value, str) and not value.startswith(_JSON)):
        return value
    try:
        text = json.dumps(value, allow_nan=True)
        if json.loads(text) != _as_json(value):
            raise TypeError  # such as a dict whose keys are numbers
        return _JSON + text
    except TypeError as error:
        raise UsageError(
            f'the state\'s value "{name}" has the type {type(value).__name__}; expected numbers, strings, tensors, '
            "and lists and dicts, by strings, of numbers and strings"
        ) from error


def _as_json(value: Any) -> Any:
    """The value as JSON returns it: tuples become lists."""
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return {name: _as_json(item) for name, item in value.items()} if isinstance(value, dict) else value


def _nested(value: Value) -> Any:
    return json.loads(value.removeprefix(_JSON)) if isinstance(value, str) and value.startswith(_JSON) else value


class TrainingState:
    """The state of a training: its model, optimizers, schedules, scaler, loader, random numbers and values.

    Args:
        world: the ranks of the training.
        folder: the directory of the checkpoints, which is created and locked; None: nothing can be saved, to read the
            state of a training that may be running.
        keep: how many of the latest complete checkpoints to keep; 2 or more.
        settings: values that a resumed training must share with the saved one, such as the batch size.
        resume_from: the checkpoint to resume from if the folder has none: the path of a checkpoint, of a directory of
            checkpoints, or of one that contains a directory "checkpoints".

    Add all members, then call resume(), then train and save. A training that resumes has the same bits as one without
    the interruption if everything that changes from step to step is a member. A member's name is that of its part in
    the checkpoint: 1 to 60 characters of a-z, A-Z, 0-9, _ and -, used once; "training", "values" and "random" are
    reserved, and so are names that end with "-python".

    Collective: all ranks construct it and call its functions in the same order with the same arguments, unless stated
    otherwise. Used by one thread. Raises UsageError, as FOLDER_IN_USE if another training has the directory, and
    SystemError, on all ranks.
    """

    _CLOSE_ORDER = 0

    def __init__(
        self,
        world: Group,
        folder: str | os.PathLike[str] | None,
        *,
        keep: int = 2,
        settings: Mapping[str, bool | int | float | str] | None = None,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> None:
        self._state: Any = _C.TrainingState(
            world._group, os.fspath(folder or ""), keep, dict(settings or {}), os.fspath(resume_from or "")
        )
        self._fused: list[FusedOptimizer] = []
        _failures.add_owner(self)

    def _close(self) -> None:
        if self._state.in_flight():
            self._state.wait()
        self._state = None

    def add(
        self, name: str, member: Any, module: torch.nn.Module | None = None, *, each_rank: bool = False
    ) -> TrainingState:
        """Adds a member and returns this object.

        Args:
            name: of its part in the checkpoint.
            member: one of
                a module: its parameters, and its buffers except those that are registered with persistent=False;
                an optimizer of lockstep.optim;
                an optimizer of torch.optim, with the `module` that has its parameters, whose names are saved;
                a schedule of torch.optim.lr_scheduler; the learning rates themselves belong to the optimizer;
                a DistributedDataParallel of this package: its bucket layout, for bucket_layout(), and what hosts that
                train apart need (average_hosts_every, outer); a HostSync: likewise. Then the first rank of each host
                saves all members, and a host resumes from its own; a new one, from those of rank 0;
                a PowerSGD or an Int8, whose state is each rank's own;
                an object with state_dict() and load_state_dict() whose values are numbers, strings, tensors, and lists
                and dicts of numbers and strings: a loader, a GradScaler, your own;
                a bool, int, float, str or tensor: a value that this object keeps, state[name].
            each_rank: each rank saves a state of its own, instead of rank 0 for all. A rank that did not exist in the
                previous job loads the state of rank 0.

        A member that is added after resume() is restored at once. Raises UsageError for a name that is invalid or in
        use.
        """
        if name.endswith("-python"):
            raise UsageError(f'the name is "{name}"; expected one that does not end with "-python"')
        if isinstance(member, _VALUES):
            self._state.add_value(name, member.detach() if isinstance(member, torch.Tensor) else member)
        elif isinstance(member, FusedOptimizer):
            self._fused.append(member)
            self._add(name, member._optimizer.state_dict, member._optimizer.load_state_dict)
            options_of = partial(_optimizer_state.options_of, member)
            load_options = partial(_optimizer_state.load_options, member)
            self._add(f"{name}-python", options_of, load_options, optional=True)
        elif isinstance(member, torch.optim.Optimizer):
            names = _optimizer_state.names_of(member, module)
            state_of = partial(_optimizer_state.state_of, member, names)
            self._add(name, state_of, partial(_optimizer_state.load, member, names), each_rank)
        elif isinstance(member, DistributedDataParallel):
            self._add(
                name,
                lambda: {"layout": member.stats()["layout"], **member._ddp.outer_state()},
                lambda saved: member._ddp.load_outer_state(saved),
                hosts_differ=member._ddp.hosts_differ(),
            )
        elif isinstance(member, StatefulHook):
            self._add(name, member.state_dict, member.load_state_dict, each_rank=True)
        elif isinstance(member, HostSync):
            hosts_differ = member._averager is not None
            self._add(name, member.state_dict, member.load_state_dict, hosts_differ=hosts_differ)
        elif isinstance(member, torch.nn.Module):
            load = partial(_load_module, self._fused, name, member)  # not this object, whose C++ part owns the function
            self._add(name, partial(_tensors_of, member), load, each_rank)
        elif isinstance(member, torch.optim.lr_scheduler.LRScheduler):
            self._add_nested(name, partial(_schedule_state, member), partial(_load_schedule, member), each_rank)
        elif hasattr(member, "state_dict") and hasattr(member, "load_state_dict"):
            self._add_nested(name, member.state_dict, member.load_state_dict, each_rank)
        else:
            raise UsageError(
                f'"{name}" has the type {type(member).__name__}; expected a module, an optimizer, a schedule, '
                "a number, a string, a tensor, or an object with state_dict() and load_state_dict()"
            )
        return self

    def _add(
        self,
        name: str,
        state_dict: Callable[[], dict[str, Value]],
        load: Callable[[dict[str, Value]], object],
        each_rank: bool = False,
        optional: bool = False,
        hosts_differ: bool = False,
    ) -> None:
        self._state.add_member(
            name, state_dict, lambda saved: (load(saved), None)[1], each_rank, optional, hosts_differ
        )

    def _add_nested(
        self,
        name: str,
        state_dict: Callable[[], Mapping[str, Any]],
        load: Callable[[dict[str, Any]], object],
        each_rank: bool,
    ) -> None:
        self._add(name, lambda: _flat_dict(state_dict()), lambda saved: load(_nested_dict(saved)), each_rank)

    def add_random_state(self) -> TrainingState:
        """Adds the generators of each rank: torch's of the CPU and of the rank's GPU, Python's, and NumPy's if it is in
        use. A rank that did not exist in the previous job derives torch's from rank 0's. Restored after all other
        members."""
        self._add("random-python", _python_random, _load_python_random, each_rank=True, optional=True)
        self._state.add_random_state()
        return self

    def resume(self, *, allow_unknown: bool = False, train_on: bool = False) -> bool:
        """Restores all members from the checkpoint that the constructor has found, and continues its numbering of
        steps. Returns False, and changes nothing, if there is none.

        Args:
            allow_unknown: state in the checkpoint that no member has is ignored instead of an error.
            train_on: a complete training is resumed, to train it further, instead of an error.

        Raises UsageError, before it changes anything, for a setting with another value, for a member whose state the
        checkpoint does not have, and for state that no member has.
        """
        return self._state.resume(allow_unknown, train_on)

    def save(self, step: int, *, finished: bool = False) -> SaveReport:
        """Writes a checkpoint of all members and returns when it is on the disk.

        Args:
            step: the number of the step, for the name of the checkpoint.
            finished: the training is complete; see is_finished.
        """
        return SaveReport(*self._state.save(step, finished))

    def save_async(self, step: int, *, finished: bool = False) -> None:
        """Copies the state of all members and returns; a thread writes the copy. Waits for an earlier save first."""
        self._state.save_async(step, finished)

    def wait(self) -> SaveReport | None:
        """Waits for the save in flight, and raises its error. None if there is none."""
        report = self._state.wait()
        return SaveReport(*report) if report else None

    @property
    def in_flight(self) -> bool:
        """Whether a save is in flight on this rank."""
        return self._state.in_flight()

    @property
    def path(self) -> str | None:
        """The checkpoint that the training resumes from; None for a new training."""
        return self._state.path()

    @property
    def step(self) -> int:
        """The step of that checkpoint; 0 for a new training."""
        return self._state.step()

    @property
    def is_finished(self) -> bool:
        """Whether that checkpoint was saved as the last one of a complete training: there is nothing left to do."""
        return self._state.is_finished()

    @property
    def unknown_parts(self) -> list[str]:
        """The names of saved members and values that this object does not have."""
        return self._state.unknown_parts()

    def bucket_layout(self, name: str) -> str:
        """The saved layout of the DistributedDataParallel that was added as `name`, for its argument bucket_layout; ""
        for a new training. With it, sums between hosts have the same bits."""
        return self._state.bucket_layout(name)

    def read(self, name: str, rank: int = 0) -> dict[str, Any]:
        """Reads the state that a rank of the previous job saved. Any rank may call it."""
        return _nested_dict(self._state.read(name, rank))

    def __getitem__(self, name: str) -> Value:
        """A value that add() was called with."""
        return self._state.value(name)

    def __setitem__(self, name: str, value: Value) -> None:
        """Sets such a value; its type stays the same. It is the same on all ranks."""
        self._state.set_value(name, value)


def _load_module(fused: list[FusedOptimizer], name: str, module: torch.nn.Module, saved: dict[str, Value]) -> None:
    own = _tensors_of(module)
    left_out = non_persistent_buffers(module)  # a checkpoint of the C++ library has them
    saved = {key: value for key, value in saved.items() if key not in left_out}
    for key, tensor in own.items():
        found = saved.get(key)
        if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            what = "has another shape or dtype" if isinstance(found, torch.Tensor) else "is missing"
            raise UsageError(
                f'resume: "{key}" of "{name}" {what} in the checkpoint; expected the tensors of the module',
                hint="register a buffer that the module computes anew, and whose size changes, with persistent=False"
                if key in dict(module.named_buffers(remove_duplicate=False))
                else "",
                cause="BAD_FILE",
            )
    unexpected = next((key for key in saved if key not in own), None)
    if unexpected is not None:
        raise UsageError(
            f'resume: "{unexpected}" of "{name}" is unexpected in the checkpoint; expected the tensors of the module',
            cause="BAD_FILE",
        )

    def copy_into(keys: list[str]) -> None:
        with torch.no_grad():
            for key in keys:
                own[key].copy_(saved[key])

    rest = set(own)
    for optimizer in fused:
        shared = {p.data_ptr() for p in _optimizer_state.parameters_of(optimizer)}
        keys = [key for key, tensor in own.items() if tensor.data_ptr() in shared]
        optimizer.change_parameters(lambda keys=keys: copy_into(keys))  # type: ignore[misc]
        rest.difference_update(keys)
    copy_into([key for key in own if key in rest])


def _tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, as state_dict() has them without the hooks of modules."""
    tensors = {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)}
    left_out = non_persistent_buffers(module)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name not in left_out:
            tensors[name] = buffer.detach()
    return tensors


def _flat_dict(state: Mapping[str, Any]) -> dict[str, Value]:
    return {str(name): _flat(str(name), value) for name, value in state.items()}


def _nested_dict(state: Mapping[str, Value]) -> dict[str, Any]:
    return {name: _nested(value) for name, value in state.items()}


def _schedule_state(schedule: Any) -> dict[str, Any]:
    """Numbers, strings, lists and dicts; the functions of LambdaLR are code, which is not saved."""
    state = {name: value for name, value in schedule.state_dict().items() if name not in ("lr_lambdas", "_schedulers")}
    for name, value in state.items():
        if isinstance(value, collections.Counter):  # the milestones of MultiStepLR
            state[name] = sorted(value.elements())
    if hasattr(schedule, "_schedulers"):  # of SequentialLR and ChainedScheduler
        state["_schedulers"] = [_schedule_state(scheduler) for scheduler in schedule._schedulers]
    return state


def _load_schedule(schedule: Any, saved: dict[str, Any]) -> None:
    inner = saved.pop("_schedulers", [])
    if len(inner) != len(getattr(schedule, "_schedulers", [])):
        raise UsageError(f"the saved schedule has {len(inner)} inner ones; expected {len(schedule._schedulers)}")
    for name, value in saved.items():
        is_counter = isinstance(getattr(schedule, name, None), collections.Counter)
        setattr(schedule, name, collections.Counter(value) if is_counter else value)
    for scheduler, state in zip(getattr(schedule, "_schedulers", []), inner, strict=True):
        _load_schedule(scheduler, state)


_NUMPY_STATE = ("numpy.name", "numpy.keys", "numpy.position", "numpy.has_gauss", "numpy.cached")


def _python_random() -> dict[str, Value]:
    version, numbers, gauss = random.getstate()
    state: dict[str, Value] = {"version": version, "numbers": torch.tensor(numbers, dtype=torch.int64)}
    if gauss is not None:
        state["gauss"] = gauss
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state |= zip(_NUMPY_STATE, [name, torch.tensor(keys.astype("int64")), *rest], strict=True)
    return state


def _load_python_random(state: dict[str, Any]) -> None:
    random.setstate((state["version"], tuple(state["numbers"].tolist()), state.get("gauss")))
    if "numpy.name" in state:
        import numpy

        name, keys, *rest = (state[part] for part in _NUMPY_STATE)
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
