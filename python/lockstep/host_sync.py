"""Less traffic between hosts for torch's DistributedDataParallel."""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep import _C
from lockstep.errors import UsageError

_WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class HostSync:
    """Lets hosts exchange less in a training with torch's DistributedDataParallel, over any backend.

    >>> net = torch.nn.parallel.DistributedDataParallel(Net())
    >>> hosts = lockstep.HostSync(net, every=8, wire_dtype=torch.bfloat16)
    >>> ...                        # the loop stays as it is
    >>> hosts.sync()               # before evaluating or saving

    Registers a communication hook, so no other can be registered. All ranks of the default group must construct it,
    with equal arguments, before the first forward; `ddp` must use the default group. Every rank has the same weight, so
    a host with more ranks weighs more. Threads: that of the training.

    Args:
        every: N > 1: gradients are averaged within each host only. At the next forward in training after N backward
            passes (those under no_sync() do not count), parameters and floating-point buffers are averaged between
            hosts: 1/N of the traffic. The states of the optimizer remain those of each host (Local SGD: Lin, Stich,
            Patel, Jaggi, 2018, https://arxiv.org/abs/1808.07217).
        wire_dtype: torch.bfloat16 or torch.float16: what is sent between hosts is rounded to it, and added in float32;
            within a host nothing is rounded. With `every=1` it requires the backend "lockstep" and parameters on the
            CPU; over Gloo and NCCL, torch's bf16_compress_hook rounds gradients between all ranks.

    Raises:
        UsageError: an argument is wrong, or both are the defaults, which would change nothing.
    """

    def __init__(
        self, ddp: nn.parallel.DistributedDataParallel, *, every: int = 1, wire_dtype: torch.dtype = torch.float32
    ) -> None:
        _check(ddp, every, wire_dtype)
        self.every, self.wire_dtype = every, wire_dtype
        self._ddp = weakref.ref(ddp)  # which keeps this object
        self._size = dist.get_world_size()
        self._backend = _lockstep_backend(ddp)
        if every == 1:
            if self._backend is None:
                raise UsageError(
                    'HostSync: wire_dtype without every needs the backend "lockstep" and parameters on the CPU; over '
                    "Gloo and NCCL, register torch's default_hooks.bf16_compress_hook"
                )
            ddp.register_comm_hook(self, _reduce_between_hosts)
            return
        hosts = _ranks_of_hosts()
        self._own = next(ranks for ranks in hosts if dist.get_rank() in ranks)
        # All ranks make all groups.
        groups = [dist.new_group(ranks) for ranks in hosts]
        self._inside = groups[hosts.index(self._own)]
        self._leaders = dist.new_group([ranks[0] for ranks in hosts]) if self._backend is None else None
        average = weakref.WeakMethod(self._average)  # no circle through C++

        def exchange(flat: torch.Tensor, equal_on_host: bool) -> None:
            if call := average():
                call(flat, equal_on_host)

        self._averager = _C.HostAverager(every, exchange if len(hosts) > 1 else None)
        ddp.register_comm_hook(self, _reduce_inside)
        ddp.register_forward_pre_hook(lambda ddp, _: self._sync_if_due(ddp))

    def sync(self) -> None:
        """Makes parameters and floating-point buffers equal on all hosts, with `every` above 1. Collective; blocks."""
        ddp = self._ddp()
        if self.every > 1 and ddp is not None:
            self._averager.average(list(ddp.module.parameters()), equal_on_host=True)
            # A graph may have saved a buffer, which is no error, as in torch's own broadcast of buffers.
            self._averager.average([buffer.data for buffer in ddp.module.buffers()], equal_on_host=False)

    def _sync_if_due(self, ddp: nn.Module) -> None:
        if ddp.training and torch.is_grad_enabled() and self._averager.is_due():
            self.sync()

    def _average(self, flat: torch.Tensor, is_equal: bool) -> None:
        """Replaces `flat` by its mean over all ranks. `is_equal`: it is equal on all ranks of a host."""
        if self._backend is not None:
            return self._start_mean(flat).wait()
        if not is_equal:
            dist.all_reduce(flat.div_(len(self._own)), group=self._inside)
        if dist.get_rank() == self._own[0]:
            flat.mul_(len(self._own) / self._size)
            self._add_leaders(flat)
        dist.broadcast(flat, self._own[0], group=self._inside)

    def _start_mean(self, flat: torch.Tensor) -> Any:
        """Over all ranks, by the backend lockstep. Returns the Work."""
        flat.div_(self._size)
        if flat.dtype == torch.float32:
            return self._backend.allreduce_rounded(flat, self.wire_dtype)
        return dist.all_reduce(flat, async_op=True)

    def _add_leaders(self, flat: torch.Tensor) -> None:
        if flat.dtype != torch.float32 or self.wire_dtype == torch.float32:
            dist.all_reduce(flat, group=self._leaders)
            return
        own = flat.to(self.wire_dtype)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self._leaders))]
        dist.all_gather(parts, own, group=self._leaders)
        flat.zero_()
        for part in parts:  # in the same order on all hosts, so that all get the same bits
            flat.add_(part)


# Communication hooks, whose annotations torch compares with its own. Their results are the means of the buckets.


def _reduce_inside(state: HostSync, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if bucket.is_last():
        state._averager.count_reduction()
    flat = bucket.buffer().div_(len(state._own))
    work = dist.all_reduce(flat, group=state._inside, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _reduce_between_hosts(state: HostSync, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state._start_mean(bucket.buffer()).get_future().then(lambda future: future.value()[0])


def _check(ddp: Any, every: int, wire_dtype: torch.dtype) -> None:
    if not isinstance(ddp, nn.parallel.DistributedDataParallel):
        raise UsageError(
            f"HostSync: ddp is a {type(ddp).__name__}; expected a torch.nn.parallel.DistributedDataParallel. That of "
            "lockstep has the options average_hosts_every and wire_dtype"
        )
    if ddp.process_group != dist.group.WORLD:
        raise UsageError("HostSync: ddp has a process group of its own; expected the default one")
    if not isinstance(every, int) or every < 1:
        raise UsageError(f"HostSync: every is {every!r}; expected an integer of at least 1")
    if wire_dtype not in _WIRE_DTYPES:
        raise UsageError(f"HostSync: wire_dtype is {wire_dtype}; expected float32, bfloat16 or float16 of torch")
    if every == 1 and wire_dtype == torch.float32:
        raise UsageError(
            "HostSync: every is 1 and wire_dtype is torch.float32, which changes nothing; expected another"
        )


def _lockstep_backend(ddp: nn.Module) -> Any:
    """The backend lockstep of the default group, if it reduces the module's tensors itself."""
    if any(p.device.type != "cpu" for p in ddp.parameters()):
        return None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return backend if isinstance(backend, _C.ProcessGroupLockstep) else None


def _ranks_of_hosts() -> list[list[int]]:
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, _C.host_id())
    return [[rank for rank, own in enumerate(names) if own == name] for name in dict.fromkeys(names)]
