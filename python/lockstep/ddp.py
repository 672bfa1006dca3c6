"""Data-parallel training: gradients become their mean over all ranks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from lockstep import _C, _engine, _failures, _optimizer_patches, _optimizer_state, _step_counts
from lockstep._optimizer_state import parameters_of
from lockstep.errors import Error, UsageError
from lockstep.group import Group, when_joined, world
from lockstep.hooks import StatefulHook
from lockstep.outer import DiLoCo, SparseLoCo

_T = TypeVar("_T")


def _check_module(module: torch.nn.Module) -> None:
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"DistributedDataParallel: module is a {type(module).__qualname__}; expected a torch.nn.Module"
        )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        kind = type(tensor).__qualname__
        if torch.nn.parameter.is_lazy(tensor):
            raise UsageError(
                f"DistributedDataParallel: {name} has no size yet", hint="run one forward() of the module before"
            )
        if "DTensor" in type(tensor).__name__ or kind == "FlatParameter" or hasattr(tensor, "_fsdp_flattened"):
            raise UsageError(
                f"DistributedDataParallel: parameter {name} is a {kind}, which another library divides between ranks; "
                "expected a module whose ranks all hold whole tensors"
            )


def _dicts(module: torch.nn.Module) -> list[dict]:
    """The dictionaries whose entries are the tensors and modules of `module`."""
    names = ("_parameters", "_buffers", "_modules")
    found = [part.__dict__.get(name) for part in module.modules() for name in names]
    return [dictionary for dictionary in found if isinstance(dictionary, dict)]


def non_persistent_buffers(module: torch.nn.Module) -> set[str]:
    """The names of buffers that are not part of the module's state. Private to the package."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name in getattr(part, "_non_persistent_buffers_set", ())
    }


def _hash_of(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return "values " + hashlib.blake2b(values.numpy().data, digest_size=16).hexdigest()


def _first_difference(text: str, other: str) -> str:
    pairs = zip(text.split("\n"), other.split("\n"), strict=False)
    return next((f": {left} / {right}" for left, right in pairs if left != right), "")


def _hint_for_buffer(name: str) -> str:
    name = name.removeprefix("buffer ")
    return (
        f'assign new values in place, self.{name}.copy_(...), or pass ignore=[{name!r}] or buffers="local"; a cache '
        "whose size changes is registered with persistent=False"
    )


_all: weakref.WeakValueDictionary[int, DistributedDataParallel] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _existing() -> list[DistributedDataParallel]:
    """In the order in which they were made, which is the same on all ranks. Other threads may make more meanwhile."""
    return [ddp for ref in _all.valuerefs() if (ddp := ref()) is not None]


_optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
"""Optimizers in the order in which they were made, with the number of their steps."""


def _owners_of(optimizer: torch.optim.Optimizer) -> list[DistributedDataParallel]:
    """Those whose gradients the optimizer uses."""
    return [ddp for ddp in _existing() if ddp._is_open() and ddp._has_parameter_of(optimizer)]


def _require_no_backward(optimizer: torch.optim.Optimizer) -> None:
    if _C.in_backward() and _owners_of(optimizer):
        raise UsageError(
            f"{type(optimizer).__name__}: step() was called inside backward(), before the gradients were averaged over "
            "the ranks",
            hint="call step() after backward(); an optimizer of lockstep.optim updates each parameter in backward() "
            "after update_in_backward()",
        )


def _count_step_of(optimizer: torch.optim.Optimizer) -> None:
    steps = _optimizers[optimizer] = _optimizers.get(optimizer, 0) + 1
    _unaveraged.record(optimizer, steps)


@functools.cache
def _watch_skipped_steps() -> None:
    """Called when the first model is made whose hosts train apart."""
    _optimizer_patches.watch_skipped_steps(lambda optimizer: _optimizers.get(optimizer, 0), _count_skipped_step)


def _count_skipped_step(optimizer: torch.optim.Optimizer) -> None:
    """Hosts whose loss scalers skip other steps meet in the same rounds."""
    for ddp in _owners_of(optimizer):
        if not ddp._ddp.hosts_differ():
            continue
        if ddp._optimizer is not None and ddp._optimizer() is optimizer:
            optimizer._optimizer.skip_step()
        else:
            ddp._ddp.on_step_end()


def _count_optimizers() -> None:
    """Those that are made from now on."""
    _step_counts.when_made(torch.optim.Optimizer, lambda optimizer: _optimizers.setdefault(optimizer, 0))


when_joined.append(_count_optimizers)
_step_counts.before_step.append(_require_no_backward)
_step_counts.after_step.append(_count_step_of)


class _Unaveraged:
    """Finds models that no DistributedDataParallel averages although the ranks train them: a part of a model, or one
    that was made anew. At the end, the ranks compare what an optimizer of torch has made of them."""

    def __init__(self) -> None:
        self.averaged: set[int] = set()  # parameters of modules that have had a DistributedDataParallel, by id()
        self.is_active = False  # one of these had a group of several ranks
        self.trains_averaged = False  # an optimizer has made a step with one of them
        self._found: dict[int, tuple[bool, list[str], list[str]]] = {}  # shapes and values, by the optimizer's id()
        self._world: Group | None = None  # kept, once there is something to compare

    def record(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        if not self.is_active or steps & (steps - 1):  # after 1, 2, 4, ... steps
            return
        has_averaged = bool(_owners_of(optimizer))
        trained = [p for p in parameters_of(optimizer) if p.grad is not None]
        tensors = [p for p in trained if id(p) not in self.averaged]
        if tensors:
            shapes, values = [str(p.shape) for p in tensors], [_hash_of(p) for p in tensors]
            self._found[id(optimizer)] = (has_averaged, shapes, values)
            self._world = world()

    def check(self) -> None:
        """Each rank that has recorded something calls it at its end. Raises UsageError on the last one."""
        # In an optimizer of its own, a rank may have what it likes, if others train the model.
        found = [facts for facts in self._found.values() if facts[0] or not self.trains_averaged]
        if self._world is None or not found:
            return
        digests = [hashlib.blake2b(repr([facts[i] for facts in found]).encode()).hexdigest() for i in (1, 2)]
        try:
            everyone = self._world._group.leave_value(" ".join(digests).encode())
        except Error:
            return  # without the store, the ranks cannot be compared
        if len({text.split()[0] for text in everyone}) > 1 or len(set(everyone)) < 2:
            return  # other models on each rank, or equal ones
        what = "parameters that belong to no" if self.trains_averaged else "a model that belongs to no"
        raise UsageError(
            f"an optimizer of torch has trained {what} DistributedDataParallel, and they differ between the ranks",
            hint="make the DistributedDataParallel of the whole model that is trained, after the model has been made; "
            "give parameters of one rank an optimizer of their own",
        )


_unaveraged = _Unaveraged()
_failures.check_at_end(_unaveraged.check)


_KEPT = "_lockstep_kept"


class _Kept:
    """Holds what belongs to a module as long as the module exists. A copy of the module holds nothing."""

    def __init__(self, held: object) -> None:
        self._held = held

    def __reduce__(self) -> Any:
        return type(None), ()


class DistributedDataParallel:
    """Averages the gradients of a module's parameters over the ranks of a group, as long as it exists; if the program
    drops it before the first backward(), as long as the module exists.

    The module is neither wrapped nor changed: call it, and any of its methods, at any time and on any number of ranks.

    Construction is collective. It compares the models of all ranks, and copies rank 0's parameters and buffers to all.
    When backward() returns, each gradient that it computed on at least one rank is the mean over all ranks, with the
    same bits on each; a rank that did not compute it contributes zero. With an optimizer of lockstep.optim, all ranks
    on one host, gradients stay each rank's own until the optimizer's step(). Every rank calls backward() and
    the step() of its optimizers the same number of times: otherwise the ranks raise DesyncError, which names one. A
    backward() that reaches no parameter of the module does not count.

    Parameters may be frozen, unfrozen and filled with new values at any time. Parameters and buffers that are replaced,
    added, removed, or get another dtype, size or device are taken over at the next backward(), if all ranks have made
    the same change, with the same values; otherwise that backward() raises an error which names the tensor. (A
    torch.optim optimizer keeps the parameters that it was made with; one of lockstep.optim raises the error.) Each rank
    alone may replace a buffer by one of the same dtype and size. A buffer registered with persistent=False, such as a
    mask, may also change its size on each rank, and is then that rank's own.

    Args:
        module: any torch.nn.Module, with at least one parameter that requires a gradient.
        group: the ranks, as init() returns them.
        bucket_bytes: sizes of gradient buckets in bytes, one for all or two: of the first and of all others. Empty: a
            short measurement chooses.
        buffers: "broadcast": every rank has rank 0's buffers after each backward(); "mean": their mean; "local": each
            rank keeps its own, which may be replaced and change their sizes.
        ignore: names of parameters and buffers that are neither broadcast nor averaged.
        bf16_compress: sends float32 gradients as bfloat16.
        hook: a lockstep.Int8, which sends gradients as int8, or a lockstep.PowerSGD: approximations of low rank.
        wire_dtype: torch.bfloat16 or torch.float16: rounds float32 gradients only between hosts.
        average_hosts_every: N > 1: averages gradients within each host, and parameters between hosts every N steps,
            after the step of the first optimizer that has one of the model's parameters.
        outer: a lockstep.DiLoCo or lockstep.SparseLoCo, which takes the place of the mean of the parameters. The copy
            of the parameters that the hosts have in common, in float32, is taken in the first backward(), or at the end
            of the warm-up: load weights before it.
        gradient_predivide_factor: divides gradients before and after their sum, as Apex does.
        compare_replicas_every: how often, in reductions, the ranks compare hashes of all parameters, as they are when
            an optimizer of torch has made a step, or after Group.step(); and in the first reductions. 0: never.
        check_finite: raises an error that names rank and parameter for a gradient with an infinity or NaN.
        overlap: False: no gradient is reduced before the end of backward().
        bucket_layout: stats()["layout"] in the run that this one resumes, so that sums have the same bits.

    Raises:
        UsageError: an option or a parameter is not acceptable.
        CommError: the models differ (cause CONFIG_MISMATCH); the first difference is named.
    """

    _CLOSE_ORDER = 1

    def __init__(
        self,
        module: torch.nn.Module,
        group: Group,
        *,
        bucket_bytes: Sequence[int] = (1 << 20, 25 << 20),
        buffers: str = "broadcast",
        ignore: Sequence[str] = (),
        bf16_compress: bool = False,
        hook: StatefulHook | None = None,
        wire_dtype: torch.dtype = torch.float32,
        average_hosts_every: int = 1,
        outer: DiLoCo | SparseLoCo | None = None,
        gradient_predivide_factor: float = 0.0,
        compare_replicas_every: int = 100,
        check_finite: bool = False,
        overlap: bool = True,
        bucket_layout: str = "",
    ) -> None:
        if not isinstance(wire_dtype, torch.dtype):
            raise UsageError(
                f"DistributedDataParallel: wire_dtype is {wire_dtype!r}; expected torch.float32, torch.bfloat16 or "
                "torch.float16"
            )
        if not isinstance(hook, StatefulHook | None) or (hook and bf16_compress):
            raise UsageError(
                f"DistributedDataParallel: hook is {hook!r}; expected a lockstep.PowerSGD or a lockstep.Int8 without "
                "bf16_compress, or None"
            )
        if not isinstance(outer, DiLoCo | SparseLoCo | None):
            raise UsageError(
                f"DistributedDataParallel: outer is {outer!r}; expected a lockstep.DiLoCo, a lockstep.SparseLoCo or "
                "None"
            )
        if isinstance(module, torch.nn.Module):
            module.__dict__.pop(_KEPT, None)
        self.group = group
        self._module: Callable[[], Any] = lambda: module
        self._options = {
            "bucket_bytes": list(bucket_bytes),
            "buffers": buffers,
            "ignore": list(ignore),
            "bf16_compress": bf16_compress,
            "hook": hook and hook._hook,
            "wire_dtype": wire_dtype,
            "average_hosts_every": average_hosts_every,
            "outer": outer,
            "gradient_predivide_factor": float(gradient_predivide_factor),
            "compare_replicas_every": compare_replicas_every,
            "check_finite": check_finite,
            "overlap": overlap,
            "bucket_layout": bucket_layout,
        }
        self._ignored = set(ignore)
        self._own_buffers: set[str] = set()  # those that have become this rank's own
        self._no_sync_depth = 0
        self._accumulated_at = -1  # the number of reductions when no_sync() ended
        self._optimizer: Any = None  # a weak reference to the one of lockstep.optim
        self._dicts = _C.ModuleDicts()
        self._attach()
        _all[next(_numbers)] = self
        _unaveraged.averaged.update(map(id, module.parameters()))
        _unaveraged.is_active |= group.size > 1
        _failures.add_owner(self)

    def _attach(self, broadcast: bool = True) -> None:
        module = self.module
        _check_module(module)
        self._known = self._facts()
        self._ddp = _C.DistributedDataParallel(
            list(module.named_parameters()),
            [(name, buffer) for name, buffer in module.named_buffers() if name not in self._own_buffers],
            self.group._group,
            self._options,
            broadcast,
        )
        if self._ddp.hosts_differ():
            _watch_skipped_steps()
        self._dicts.watch(_dicts(module))
        own = [p for name, p in module.named_parameters() if name not in self._ignored]
        self._ids = set(map(id, own))
        _step_counts.watch(self, own, DistributedDataParallel._count_step)

    def _count_step(self) -> None:
        if self._is_open():
            self._ddp.count_optimizer_step()
            self._ddp.on_step_end()
            _unaveraged.trains_averaged = True

    def _is_open(self) -> bool:
        return hasattr(self, "_ddp")

    def _close(self) -> None:
        vars(self).pop("_ddp", None)

    def __del__(self) -> None:
        # A function may have made this object, and its caller trains the module: from now on, that owns the object.
        ddp = getattr(self, "_ddp", None)
        if ddp is not None and not sys.is_finalizing() and self.group.size > 1 and ddp.stats()["reductions"] == 0:
            module = self.module
            self._module = weakref.ref(module)
            module.__dict__[_KEPT] = _Kept(self)

    @property
    def module(self) -> torch.nn.Module:
        """The module whose gradients are averaged."""
        return self._module()

    def _has_parameter_of(self, optimizer: torch.optim.Optimizer) -> bool:
        return not self._ids.isdisjoint(map(id, parameters_of(optimizer)))

    def _facts(self) -> dict[str, tuple[torch.Tensor, str]]:
        """All tensors that are not ignored, with their description, by "parameter NAME" or "buffer NAME"."""
        module = self.module
        found = {}
        for kind, tensors, left_out in (
            ("parameter", module.named_parameters, self._ignored),
            ("buffer", module.named_buffers, self._ignored | self._own_buffers),
        ):
            for name, tensor in tensors(remove_duplicate=False):
                if name not in left_out and (kind == "parameter" or self._options["buffers"] != "local"):
                    found[f"{kind} {name}"] = (tensor, f"{tensor.dtype}{list(tensor.shape)} on {tensor.device}")
        return found

    def _take_over_buffers(self) -> None:
        """Takes over the changes of buffers for which the ranks need not agree: one that was replaced by a tensor of
        the same dtype and size is synchronised as before, and one that is not persistent, and was replaced by another
        tensor, added or removed, is this rank's own from now on."""
        now, may_change = self._facts(), non_persistent_buffers(self.module)
        for fact in [fact for fact in {**self._known, **now} if fact.startswith("buffer ")]:
            name = fact.removeprefix("buffer ")
            (before, text), (tensor, new_text) = (facts.get(fact, (None, "")) for facts in (self._known, now))
            if before is tensor:
                continue
            if text == new_text and not self._ddp.hosts_differ():
                self._ddp.replace_buffer(before, tensor)
                self._known[fact] = now[fact]
            elif name in may_change:
                self._own_buffers.add(name)
                self._known.pop(fact, None)

    def _changes(self) -> dict[str, str]:
        """What has happened to each tensor since _attach()."""
        now, changes = self._facts(), {}
        for name in [*self._known, *now]:
            if name not in now:
                changes[name] = "was removed"
            elif name not in self._known:
                changes[name] = "was added"
            elif now[name][0] is not self._known[name][0]:
                changes[name] = "was replaced"
            elif now[name][1] != self._known[name][1]:
                changes[name] = f"was changed from {self._known[name][1]} to {now[name][1]}"
        return changes

    def _take_over_changes(self) -> None:
        """Before each backward(): takes over the changes of the module."""
        if not self._is_open() or not self._dicts.have_changed() or not self._ddp.belongs_to_this_thread():
            return
        self._take_over_buffers()
        if self._changes():
            self._take_over()
        else:
            self._dicts.watch(_dicts(self.module))  # a module without tensors was added or removed

    def _take_over(self) -> None:
        """Makes the C++ object anew, for tensors of the module that have changed. Collective."""
        changes = self._changes()
        first, what = next(iter(changes.items()))
        begin = f"backward(): {first} {what} after its DistributedDataParallel was made"
        is_buffer = first.startswith("buffer ")
        if self._ddp.hosts_differ():
            raise UsageError(
                f"{begin}, and its hosts train apart",
                hint="call average_hosts(), change the module, and make a new DistributedDataParallel",
            )
        if self._optimizer is not None and self._optimizer() is not None:
            if is_buffer:
                raise UsageError(f"{begin}, and an optimizer of lockstep.optim uses it", hint=_hint_for_buffer(first))
            kind = type(self._optimizer()).__name__
            raise UsageError(
                f"{begin}, and lockstep.optim.{kind} has the tensors from before",
                hint=f"after the change, make a new DistributedDataParallel and a new lockstep.optim.{kind}",
            )
        if self._no_sync_depth > 0 or self._accumulated_at == self._ddp.stats()["reductions"]:
            raise UsageError(
                f"{begin}, and gradients that no_sync() has accumulated were not averaged",
                hint="change the module after a backward() outside no_sync()",
            )
        now = self._facts()
        own = "\n".join(
            f"{name} {text}; {now[name][1]}, {_hash_of(now[name][0])}" if name in now else f"{name} {text}"
            for name, text in changes.items()
        )
        hint = _hint_for_buffer(first) if is_buffer else "make the same change on all ranks, with the same values"
        gathered = self.group._group.all_gather_bytes(own.encode(), f"{first} {what}", None, hint)
        everyone = [text.decode() for text in gathered]
        for rank, text in enumerate(everyone):
            if text != everyone[0]:
                raise UsageError(
                    f"{begin}, but differently on ranks 0 and {rank}{_first_difference(everyone[0], text)}", hint=hint
                )
        vars(self).pop("_ddp", None)
        self._attach(broadcast=False)  # the graph of this backward() needs the values as they are

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In this block, backward() only accumulates gradients on this rank. The first one after it reduces the sum."""
        guard = self._ddp.no_sync()
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1
            self._accumulated_at = self._ddp.stats()["reductions"]
            del guard

    def average_hosts(self) -> None:
        """With average_hosts_every: averages parameters and floating-point buffers between hosts now; with `outer`, a
        round, if steps were made since the last one. To evaluate, use with_global_copy(). Collective."""
        self._ddp.average_hosts()

    def with_global_copy(self, body: Callable[[], _T]) -> _T:
        """With `outer`: calls body(), for example an evaluation, with the parameters that the hosts had in common after
        the last round, and then gives them their own values again. Returns what body() returns. The ranks of a host
        call it together."""
        result: list[_T] = []
        self._ddp.with_global_copy(lambda: result.append(body()))
        return result[0]

    def compare_replicas(self) -> None:
        """Compares the parameters of all ranks now; raises an error of cause REPLICA_DIVERGED that names the first that
        differs. Collective."""
        self._ddp.compare_replicas()

    def stats(self) -> dict[str, Any]:
        """Counts of reductions since construction.

        in_place: gradients are reduced where they are, in memory that the ranks share; otherwise they are packed.
        reductions, operations, bytes: finished reductions; operations and bytes of gradients passed to the transport.
        copies_in, copies_out: gradients copied into buckets, and out of them.
        started_early: gradients (in_place) or buckets of the last reduction that started before the end of backward().
        bucket_bytes: the sizes of buckets.
        order: the names of gradients in the order in which they are reduced.
        layout: `bucket_layout` of a run that resumes this one.
        """
        return self._ddp.stats()


def join(
    models: DistributedDataParallel | Sequence[DistributedDataParallel],
    loop: Callable[[], object],
    *,
    divide_by_initial_world_size: bool = True,
) -> None:
    """Runs loop(), a training loop whose number of batches may differ between ranks. A rank whose loop has ended takes
    part in the reductions of the others with zeros, until all have ended; then all ranks get the parameters of one that
    trained to the end, and the state and options of its optimizers of torch that have them. A schedule that makes steps
    in the loop stays behind on a rank whose loop has ended: make its steps after join(). Optimizers that were made
    before lockstep.init() are known only once they have made a step. Collective.

    Args:
        models: every DistributedDataParallel that the loop trains.
        divide_by_initial_world_size: whether means are over all ranks, or over those that still have batches.
    """
    listed = [models] if isinstance(models, DistributedDataParallel) else list(models)
    root = _C.join([model._ddp for model in listed], lambda: (loop(), None)[1], divide_by_initial_world_size)
    if root is None:
        return
    fused = [model._optimizer() for model in listed if model._optimizer is not None]
    mine = [o for o in _optimizers if o not in fused and not set(listed).isdisjoint(_owners_of(o))]
    group = listed[0].group
    kinds = group.all_gather_object([type(optimizer).__name__ for optimizer in mine], name="optimizers of join()")
    if kinds != kinds[:1] * group.size:
        raise UsageError(
            f"join(): the ranks have other optimizers: {kinds}",
            hint="make the optimizers after lockstep.init(), and the same ones on all ranks",
        )
    for optimizer in mine:
        _optimizer_state.broadcast(optimizer, group, root)


def broadcast_parameters(module: torch.nn.Module, group: Group, root: int = 0) -> None:
    """Copies rank `root`'s parameters and buffers to all ranks. Collective."""
    with torch.no_grad():
        _C.broadcast_tensors([*module.named_parameters(), *module.named_buffers()], group._group, root)


def _take_over_changes() -> None:
    for ddp in _existing():
        ddp._take_over_changes()


_engine.around_backward(before=_take_over_changes)
