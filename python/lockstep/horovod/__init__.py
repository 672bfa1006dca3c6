"""Horovod's interface for PyTorch, over Lockstep: a script changes its import.

>>> import lockstep.horovod as hvd        # instead of horovod.torch
>>> hvd.init()
>>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

$ lockstep run -n 4 python train.py       # or lockstep horovodrun, with horovodrun's arguments

All ranks make the same calls in the same order; Horovod waits until they meet by name, Lockstep raises DesyncError for
calls that differ. The gradients of a DistributedOptimizer are reduced in step() or synchronize(). New programs use
lockstep.DistributedDataParallel, which reduces them during backward().
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from lockstep import _C, _engine
from lockstep._optimizer_state import parameters_of
from lockstep.errors import CommError, UsageError
from lockstep.horovod import elastic, operations
from lockstep.horovod.operations import *  # noqa: F403
from lockstep.outer import DiLoCo, SparseLoCo

__all__ = ["DistributedOptimizer", "HorovodInternalError", "elastic", "run"]
__all__ += operations.__all__

HorovodInternalError = CommError

_PACKED_BYTES = 1 << 20  # gradients smaller than this are packed into messages of about this size


_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


def _before_backward() -> None:
    for optimizer in list(_optimizers):
        optimizer._gradients_before = optimizer._gradient_versions()


def _after_backward() -> None:
    for optimizer in list(_optimizers):
        if optimizer._gradient_versions() != optimizer._gradients_before:
            optimizer._passes += 1
            optimizer._surplus_passes += optimizer._passes > optimizer.backward_passes_per_step


_engine.around_backward(_before_backward, _after_backward)


class _DistributedOptimizer:
    """What DistributedOptimizer() adds to the class of an optimizer."""

    param_groups: list[dict[str, Any]]

    _averager: Any = None  # of hosts that train apart
    _group: Any = None  # the ranks whose gradients are reduced; None: all

    def _train_apart(self, every: int, outer: DiLoCo | SparseLoCo | None) -> None:
        world = operations.joined()
        self._averager, self._group = _C.HostAverager(every, outer, world._group), world.split_by_host()

    def _parameters(self) -> list[torch.Tensor]:
        return [p.detach() for p in parameters_of(self) if p.is_floating_point() or p.is_complex()]

    def average_hosts(self) -> None:
        """With average_hosts_every or `outer`: makes the parameters equal on all hosts now. All ranks call it."""
        if self._averager is not None:
            self._averager.average(self._parameters(), [], True)

    def _distribute(
        self, names: dict[int, str], compression: Any, op: str, factor: float, sparse_as_dense: bool, passes: int
    ) -> None:
        self._names, self._compression, self._op = names, compression, op
        self._predivide_factor, self._sparse_as_dense = factor, sparse_as_dense
        self.backward_passes_per_step = passes
        self._synchronized, self._should_synchronize = False, True
        self._passes = 0  # of backward() since the last synchronize()
        # What differs between ranks if one leaves a step out: the passes beyond backward_passes_per_step, and the calls
        # of zero_grad(). The names of reductions contain them, and ranks compare names.
        self._surplus_passes = self._num_zero_grads = 0
        _optimizers.add(self)

    def _gradient_versions(self) -> list[Any]:
        gradients = [p.grad for p in parameters_of(self)]
        return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        self._num_zero_grads += 1
        super().zero_grad(*arguments, **options)  # type: ignore[misc]

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.backward_passes_per_step = passes

    def _dense_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The name and the gradient of each parameter that may have one; zeros where this rank computed none."""
        for p in parameters_of(self):
            if not p.requires_grad:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if p.grad.is_sparse and not self._sparse_as_dense:
                raise UsageError(
                    f"hvd.DistributedOptimizer: the gradient of {self._names[id(p)]} is sparse",
                    hint="pass sparse_as_dense=True",
                )
            if p.grad.is_sparse:
                p.grad = p.grad.to_dense()
            yield self._names[id(p)], p.grad.detach()

    def _messages(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """The gradients that are sent together, with their name: a large one alone, small ones of one dtype."""
        small: list[torch.Tensor] = []
        first, num_bytes = "", 0
        for name, gradient in self._dense_gradients():
            if gradient.nbytes >= _PACKED_BYTES:
                yield f"gradient of {name}", [gradient]
                continue
            if small and (small[0].dtype, small[0].device) != (gradient.dtype, gradient.device):
                yield first, small
                small = []
            if not small:
                first, num_bytes = f"gradients of {name}..", 0
            small.append(gradient)
            num_bytes += gradient.nbytes
            if num_bytes >= _PACKED_BYTES:
                yield first, small
                small = []
        if small:
            yield first, small

    def synchronize(self) -> None:
        """Reduces the gradients over all ranks. step() does so by itself, unless it is in skip_synchronize()."""
        if self._averager is not None and self._averager.must_begin():
            self._averager.begin(self._parameters())
        if (self._group or operations.joined()).size == 1:
            self._synchronized = True
            return
        counts = f"after {self._num_zero_grads} zero_grad() calls"
        if self._surplus_passes:
            counts += f", {self._surplus_passes} backward() calls without step()"
        handles: list[Any] = []
        unpacked: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, gradients in self._messages():
            sent = gradients[0]
            if sent.nbytes < _PACKED_BYTES:
                sent = torch.cat([gradient.reshape(-1) for gradient in gradients])
                unpacked += zip(gradients, sent.split([gradient.numel() for gradient in gradients]), strict=True)
            factors = 1 / self._predivide_factor, self._predivide_factor  # 1 unless the operation is Average
            label = f"{name} {counts}"
            handles.append(
                operations.start_allreduce(sent, sent, self._op, label, *factors, self._compression, self._group)
            )
        for handle in handles:
            handle.wait()
        for gradient, part in unpacked:
            gradient.copy_(part.view_as(gradient))
        self._synchronized, self._passes = True, 0

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this block, step() does not reduce gradients, because synchronize() has done so."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() reduces the gradients again after optimizer.synchronize(); use "
                    "optimizer.skip_synchronize()",
                    stacklevel=2,
                )
            if closure is not None:
                raise UsageError(
                    "hvd.DistributedOptimizer: step(closure) would reduce gradients that closure() has not computed",
                    hint="call closure() and optimizer.synchronize(), and step() in skip_synchronize()",
                )
            self.synchronize()
        self._synchronized = False
        result = super().step(closure)  # type: ignore[misc]
        if self._averager is not None:
            self._averager.count_reduction()
            if self._averager.is_due():
                self.average_hosts()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # so that torch adds its hooks once, to the step that this calls


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = operations.Compression.none,
    backward_passes_per_step: int = 1,
    op: str = operations.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: operations.ProcessSet = operations.global_process_set,
    average_hosts_every: int = 1,
    outer: DiLoCo | SparseLoCo | None = None,
) -> Any:
    """Makes step() of `optimizer` reduce the gradients over all ranks first, and returns it.

    Args:
        named_parameters: the names for error messages.
        backward_passes_per_step: how often backward() is called before step(); the gradients are added, and reduced
            once.
        gradient_predivide_factor: divides gradients before their sum, which is multiplied by factor / size.
        num_groups, groups: ignored: small gradients are always sent together.
        average_hosts_every, outer: not of Horovod: those of lockstep.DistributedDataParallel, for slow networks. Hosts
            whose loss scalers skip other steps wait for each other. Evaluate and save after optimizer.average_hosts().
    """
    operations.check_set(process_set)
    chosen = operations.op_of(None, op)
    if gradient_predivide_factor != 1.0 and chosen != operations.Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    listed = parameters_of(optimizer)
    if named_parameters is None:
        named = [(f"parameter {index}", p) for index, p in enumerate(listed)]
    else:
        named = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter)")
    if len({name for name, _ in named}) < len(named):
        raise ValueError("Parameter names in named_parameters must be unique")
    names = {id(p): name for name, p in named}
    if any(id(p) not in names for p in listed):
        raise ValueError("named_parameters was specified, but one or more model parameters were not named")
    of_scheduler = optimizer.__dict__.pop("step", None)  # a schedule made before has bound the step of the old class
    kind = optimizer.__class__
    optimizer.__class__ = type(kind.__name__, (_DistributedOptimizer, kind), {})
    optimizer._distribute(
        names, compression, chosen, gradient_predivide_factor, sparse_as_dense, backward_passes_per_step
    )
    if average_hosts_every > 1 or outer is not None:
        optimizer._train_apart(average_hosts_every, outer)
    if of_scheduler is not None:

        def step(self: Any, *arguments: Any, **options: Any) -> Any:
            self._opt_called = True
            return type(self).step(self, *arguments, **options)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = step.__get__(optimizer)
    return optimizer


def run(*arguments: Any, **options: Any) -> Any:
    raise UsageError("horovod.run() is not supported", hint="start the script with lockstep run -n N python SCRIPT")
