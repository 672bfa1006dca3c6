"""torch's functions that read or change gradients see the mean over the ranks, as they do after a backward() of torch's
DistributedDataParallel, where an optimizer of lockstep.optim has left each rank its own gradients. The
first of these optimizers changes the functions."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep._optimizer_state import parameters_of
from lockstep.errors import UsageError

_optimizers: weakref.WeakSet = weakref.WeakSet()  # those of lockstep.optim
_installed = False


def _average_gradients_of(parameters: list[torch.Tensor]) -> None:
    """Averages the gradients of our optimizers that have one of these parameters. All ranks pass the same ones."""
    ids = {id(parameter) for parameter in parameters}
    for optimizer in list(_optimizers):
        if optimizer._optimizer is not None and not ids.isdisjoint(optimizer._names):
            optimizer.average_gradients()


def _with_local_gradients() -> list[Any]:
    return [optimizer for optimizer in list(_optimizers) if optimizer._has_local_gradients()]


def _require_no_local_gradients(gradients: list[torch.Tensor]) -> None:
    ids = {id(gradient) for gradient in gradients}
    for optimizer in _with_local_gradients():
        if any(id(p.grad) in ids for p in parameters_of(optimizer) if p.grad is not None):
            raise UsageError(
                "torch.nn.utils.get_total_norm(): these are gradients of this rank alone",
                hint="call the optimizer's average_gradients() before",
            )


def _require_own_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """torch.optim would update parameters from this rank's own gradients, and the ranks would drift apart."""
    if optimizer in _optimizers:
        return
    for ours in _with_local_gradients():
        ids = {id(p) for p in parameters_of(optimizer) if p.grad is not None}
        if not ids.isdisjoint(ours._names):
            name = type(ours).__name__
            raise UsageError(
                f"torch.optim.{type(optimizer).__name__}: step() with gradients of this rank alone, because "
                f"lockstep.optim.{name} has these parameters too",
                hint=f"delete the lockstep.optim.{name}, and schedules that refer to it; or call its "
                "average_gradients() before",
            )


def _holds(cell: types.CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # it is empty
        return False


def _call_before(name: str, prepare: Callable[[list[torch.Tensor]], None]) -> bool:
    """Makes a decorated function of torch.nn.utils call `prepare` with its tensors first. Replaces what that function
    calls, so that `from ... import` has the replaced one too. Returns False if the function is there, and is not such a
    one."""
    function = getattr(torch.nn.utils, name, None)
    if function is None:  # of later versions of torch
        return True
    inner = getattr(function, "__wrapped__", None)
    cells = [cell for cell in getattr(function, "__closure__", None) or () if _holds(cell, inner)]
    if inner is None or len(cells) != 1:
        return False

    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        first, tensors = next(iter(bound.arguments.items()))
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        bound.arguments[first] = listed
        prepare(listed)
        return inner(*bound.args, **bound.kwargs)

    cells[0].cell_contents = call
    return True


def watch_skipped_steps(steps_of: Callable[[Any], int], skipped: Callable[[Any], None]) -> None:
    """From now on, calls skipped(optimizer) when a torch.amp.GradScaler has skipped a step: steps_of(optimizer) is as
    before."""
    maybe_step = getattr(torch.amp.GradScaler, "_maybe_opt_step", None)
    if maybe_step is None:
        warnings.warn("a step that torch.amp.GradScaler skips does not count for average_hosts_every", stacklevel=4)
        return

    @functools.wraps(maybe_step)
    def step_or_skip(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = steps_of(optimizer)
        result = maybe_step(self, optimizer, *args, **kwargs)
        if steps_of(optimizer) == before:
            skipped(optimizer)
        return result

    torch.amp.GradScaler._maybe_opt_step = step_or_skip


def install(optimizers: weakref.WeakSet) -> None:
    """Takes effect once, for the optimizers of lockstep.optim, which `optimizers` contains from their beginning. Warns
    of functions that are not torch's own, or those of an unknown torch, and leaves them as they are."""
    global _optimizers, _installed
    if _installed:
        return
    _installed, _optimizers = True, optimizers
    foreign = []

    averaging = dict.fromkeys(("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_"), _average_gradients_of)
    for name, prepare in {**averaging, "get_total_norm": _require_no_local_gradients}.items():
        if not _call_before(name, prepare):
            foreign.append(f"torch.nn.utils.{name}()")

    unscale = getattr(torch.amp.GradScaler, "_unscale_grads_", None)
    if unscale is None:
        foreign.append("torch.amp.GradScaler")
    else:

        @functools.wraps(unscale)
        def unscale_averaged(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if optimizer in optimizers:
                optimizer.average_gradients()
            return unscale(self, optimizer, *args, **kwargs)

        torch.amp.GradScaler._unscale_grads_ = unscale_averaged
    register_optimizer_step_pre_hook(_require_own_step)
    if foreign:
        warnings.warn(
            f"lockstep.optim cannot patch {', '.join(foreign)} (replaced, or an unknown version of torch), which will "
            "use this rank's gradients; call optimizer.average_gradients() before",
            stacklevel=4,
        )
