"""Horovod's operations, for lockstep.horovod."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep import _C, _optimizer_state, group
from lockstep.errors import UsageError
from lockstep.group import Group, Work

__all__ = ["init", "shutdown", "is_initialized", "is_homogeneous", "ProcessSet", "global_process_set"]
__all__ += ["rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"]
__all__ += ["gloo_built", "gloo_enabled", "mpi_built", "mpi_enabled", "mpi_threads_supported"]
__all__ += ["nccl_built", "cuda_built", "rocm_built", "ddl_built", "ccl_built"]
__all__ += ["Average", "Sum", "Adasum", "Min", "Max", "Product", "Compression"]
__all__ += ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_"]
__all__ += ["grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"]
__all__ += ["allgather", "allgather_async", "allgather_object", "alltoall", "alltoall_async"]
__all__ += ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object"]
__all__ += ["broadcast_parameters", "broadcast_optimizer_state", "barrier", "join", "poll", "synchronize"]

Average, Sum, Adasum, Min, Max, Product = "Average", "Sum", "Adasum", "Min", "Max", "Product"
_OPS = {Average: "mean", Sum: "sum", Min: "min", Max: "max", Product: "product"}

_world: Group | None = None


class ProcessSet:
    """All ranks; others are refused."""

    process_set_id = 0

    def included(self) -> bool:
        return True

    def rank(self) -> int:
        return rank()

    def size(self) -> int:
        return size()


global_process_set = ProcessSet()


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the job, as lockstep.init(); further calls do nothing."""
    global _world
    if comm is not None or process_sets:
        raise UsageError("hvd.init(): comm and process_sets are not supported", hint="use lockstep.Group.split()")
    if _world is None:
        _world = group.world() or group.init()


def shutdown() -> None:
    """Leaves the job."""
    global _world
    _world = None


def is_initialized() -> bool:
    return _world is not None


def joined() -> Group:
    if _world is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _world


def rank() -> int:
    return joined().rank


def size() -> int:
    return joined().size


def local_rank() -> int:
    return joined().local_rank


def local_size() -> int:
    return joined().local_size


def cross_rank() -> int:
    """The index of this host among those that have a rank with this local rank."""
    return int(os.environ.get("HOROVOD_CROSS_RANK", joined().node_rank))


def cross_size() -> int:
    return int(os.environ.get("HOROVOD_CROSS_SIZE", joined().num_nodes))


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks."""
    return len(set(joined().all_gather_object(local_size(), name="is_homogeneous"))) == 1


def gloo_built() -> bool:
    return True


gloo_enabled = gloo_built


def mpi_built() -> bool:
    return False


mpi_enabled = mpi_threads_supported = rocm_built = ddl_built = ccl_built = mpi_built


def nccl_built() -> int:
    return int(torch.cuda.is_available() and torch.distributed.is_nccl_available())


def cuda_built() -> bool:
    return torch.version.cuda is not None


def check_set(process_set: ProcessSet) -> None:
    if process_set is not global_process_set:
        raise UsageError(
            "Horovod's process sets are not supported", hint="make a group with lockstep.Group.split(), and use that"
        )


def op_of(average: bool | None, op: str | None) -> str:
    if average is not None and op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    chosen = op if op is not None else Average if average is None or average else Sum
    if chosen == Adasum:
        raise UsageError(
            "hvd.Adasum is not supported: it adds gradients in pairs, scaled by their angle",
            hint="use hvd.Average, with the learning rate that fits the whole batch",
        )
    if chosen not in _OPS:
        raise UsageError(f"op is {op!r}; expected hvd.Average, hvd.Sum, hvd.Min, hvd.Max or hvd.Product")
    return chosen


class _NoneCompressor:
    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class _FP16Compressor(_NoneCompressor):
    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.half(), tensor.dtype) if tensor.is_floating_point() else (tensor, None)


class Compression:
    """How gradients are sent: `none`, or `fp16`, as half-precision numbers."""

    none = _NoneCompressor
    fp16 = _FP16Compressor


class _Handle:
    """An operation that has started. `finish` makes its result when it is done."""

    def __init__(self, works: Sequence[Work], finish: Callable[[], Any]) -> None:
        self.works, self._finish = works, finish
        self._result: Any = None
        self._is_done = False

    def done(self) -> bool:
        return all(work.done() for work in self.works)

    def wait(self) -> Any:
        if not self._is_done:
            for work in self.works:
                work.wait()
            self._result, self._is_done = self._finish(), True
        return self._result


def poll(handle: _Handle) -> bool:
    """Whether synchronize() would not block."""
    return handle.done()


def synchronize(handle: _Handle) -> Any:
    """Waits for an operation, and returns its result."""
    return handle.wait()


def start_allreduce(
    tensor: Tensor,
    out: Tensor | None,
    op: str,
    name: str,
    before: float = 1,
    after: float = 1,
    compression: Any = Compression.none,
    group: Group | None = None,
) -> _Handle:
    """`out`: where the result is copied to; None: a new tensor. `before`, `after`: factors. `group`: of all ranks, by
    default."""
    ranks = group or joined()
    sent, context = compression.compress(tensor.detach())
    if sent.data_ptr() == tensor.data_ptr() and out is not tensor:
        sent = sent.clone()
    if before != 1:
        sent.mul_(before)
    is_integer_mean = op == Average and not sent.is_floating_point()
    work = ranks.all_reduce_async(sent, _OPS[Sum if is_integer_mean else op], name=name)

    def finish() -> Tensor:
        if is_integer_mean:
            sent.copy_(sent.div(ranks.size, rounding_mode="trunc"))
        if after != 1:
            sent.mul_(after)
        result = compression.decompress(sent, context)
        if out is None:
            return result
        if result.data_ptr() != out.data_ptr():
            out.copy_(result)
        return out

    return _Handle([work], finish)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, op: str, name: str, before: float, after: float) -> Tensor:
        context.arguments = op, name, before, after
        return start_allreduce(tensor, None, op, name, before, after).wait()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        op, name, before, after = context.arguments
        reduced = start_allreduce(gradients[0], None, op, name and f"{name}.grad", before, after).wait()
        return reduced, None, None, None, None


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Returns the mean over all ranks, or what `op` says. Gradients flow through it."""
    check_set(process_set)
    chosen = op_of(average, op)
    sent, context = compression.compress(tensor)
    return compression.decompress(
        _AllReduce.apply(sent, chosen, name or "", prescale_factor, postscale_factor), context
    )


def _allreduce_async(
    tensor: Tensor,
    out: Tensor | None,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> _Handle:
    check_set(process_set)
    return start_allreduce(tensor, out, op_of(average, op), name or "", prescale_factor, postscale_factor)


def allreduce_async(tensor: Tensor, *arguments: Any, **options: Any) -> _Handle:
    """Starts allreduce(), without gradients and without the argument `compression`."""
    return _allreduce_async(tensor, None, *arguments, **options)


def allreduce_async_(tensor: Tensor, *arguments: Any, **options: Any) -> _Handle:
    """Starts allreduce_()."""
    return _allreduce_async(tensor, tensor, *arguments, **options)


def allreduce_(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """allreduce() in place."""
    return allreduce_async_(tensor, *arguments, **options).wait()


def grouped_allreduce(tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> list[Tensor]:
    """allreduce() of each tensor."""
    return [allreduce(tensor, *arguments, **options) for tensor in tensors]


def _grouped(handles: Sequence[_Handle]) -> _Handle:
    works = [work for handle in handles for work in handle.works]
    return _Handle(works, lambda: [handle.wait() for handle in handles])


def grouped_allreduce_async(tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> _Handle:
    """Starts grouped_allreduce(), without gradients."""
    return _grouped([allreduce_async(tensor, *arguments, **options) for tensor in tensors])


def grouped_allreduce_async_(tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> _Handle:
    """Starts grouped_allreduce_()."""
    return _grouped([allreduce_async_(tensor, *arguments, **options) for tensor in tensors])


def grouped_allreduce_(tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> list[Tensor]:
    """grouped_allreduce() in place."""
    return grouped_allreduce_async_(tensors, *arguments, **options).wait()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, name: str) -> Tensor:
        parts = joined().all_gather_unequal(tensor.detach().contiguous(), name=name)
        context.name, context.rows = name, [len(part) for part in parts]
        return torch.cat(parts)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        name = context.name and f"{context.name}.grad"
        whole = start_allreduce(gradients[0], None, Average, name).wait()  # as Horovod does
        return whole.split(context.rows)[rank()], None


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenates the ranks' tensors along the first dimension, which may differ. Gradients flow through it."""
    check_set(process_set)
    return _AllGather.apply(tensor, name or "")


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> _Handle:
    """allgather() without gradients. It has finished when it returns, because the sizes are exchanged first."""
    result = allgather(tensor.detach(), name, process_set)
    return _Handle([], lambda: result)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, root: int, name: str) -> Tensor:
        context.root, context.name = root, name
        return broadcast_async(tensor, root, name).wait()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        name = context.name and f"{context.name}.grad"
        whole = start_allreduce(gradients[0], None, Average, name).wait()  # as Horovod does
        return (whole if rank() == context.root else torch.zeros_like(whole)), None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Returns rank `root_rank`'s tensor. Gradients flow through it."""
    check_set(process_set)
    return _Broadcast.apply(tensor, root_rank, name or "")


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> _Handle:
    """Starts broadcast(), without gradients."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> _Handle:
    """Starts broadcast_()."""
    check_set(process_set)
    work = joined().broadcast_async(tensor.detach(), root_rank, name=name or "")
    return _Handle([work], lambda: tensor)


def broadcast_(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """broadcast() in place."""
    return broadcast_async_(tensor, *arguments, **options).wait()


def _exchange(tensor: Tensor, counts: list[int], name: str) -> tuple[Tensor, list[int]]:
    """Sends counts[p] rows to rank p. Returns the rows that this rank gets, and their numbers."""
    world = joined()
    rows = f"{tensor.dtype}{list(tensor.shape[1:])} rows"  # ranks compare names
    everyone = world.all_gather_object(counts, name=f"{name or 'alltoall'}.splits of {rows}")
    own = [row[world.rank] for row in everyone]
    received = tensor.new_empty((sum(own), *tensor.shape[1:]))
    world._group.all_to_all_unequal(list(received.split(own)), list(tensor.split(counts)), name, None)
    return received, own


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, counts: list[int], name: str) -> Any:
        result, own = _exchange(tensor.detach(), counts, name)
        context.name, context.own = name, own
        numbers = torch.tensor(own, dtype=torch.int32)
        context.mark_non_differentiable(numbers)
        return result, numbers

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return _exchange(gradients[0], context.own, context.name and f"{context.name}.grad")[0], None, None


def alltoall(
    tensor: Tensor, splits: Tensor | None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends splits[p] rows of `tensor` to rank p, and returns the rows that this rank gets. Without `splits`, equal
    numbers; with it, returns the numbers of rows from each rank as well. Gradients flow through it."""
    check_set(process_set)
    ranks, rows = size(), len(tensor)
    counts = [rows // ranks] * ranks if splits is None else [int(count) for count in splits]
    if sum(counts) != rows or len(counts) != ranks:
        raise ValueError(f"alltoall: splits are {counts} for {rows} rows and {ranks} ranks")
    result, numbers = _AllToAll.apply(tensor, counts, name or "")
    return result if splits is None else (result, numbers)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> _Handle:
    """alltoall() without gradients. It has finished when it returns, because the numbers are exchanged first."""
    result = alltoall(tensor.detach(), splits, name, process_set)
    return _Handle([], lambda: result)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    check_set(process_set)
    joined().barrier()


def join(device: int = -1) -> int:
    raise UsageError(
        "hvd.join() is not supported: a rank that has finished would have to know the calls of the others",
        hint="use lockstep.join() with lockstep.DistributedDataParallel, or give every rank the same number of batches",
    )


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """As lockstep.Group.broadcast_object(): numbers, strings, tensors and containers of these."""
    check_set(process_set)
    return joined().broadcast_object(obj, root_rank, name=name or "")


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    check_set(process_set)
    return joined().all_gather_object(obj, name=name or "")


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Copies rank `root_rank`'s tensors: a state_dict(), named_parameters(), or a list of tensors."""
    if isinstance(params, dict):
        tensors = sorted(params.items())
    else:
        tensors = [item if isinstance(item, tuple) else (str(index), item) for index, item in enumerate(params)]
    with torch.no_grad():
        _C.broadcast_tensors(
            [(name, tensor.detach()) for name, tensor in tensors if torch.is_tensor(tensor)], joined()._group, root_rank
        )


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Gives all ranks rank `root_rank`'s state and options of `optimizer`."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    _optimizer_state.broadcast(optimizer, joined(), root_rank)
