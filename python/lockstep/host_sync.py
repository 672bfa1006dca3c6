"""Less traffic between hosts for torch's DistributedDataParallel."""

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lockstep import _C
from lockstep.errors import UsageError
from lockstep.outer import DiLoCo, SparseLoCo

_T = TypeVar("_T")
_WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class HostSync:
    """Lets hosts exchange less in a training with torch's DistributedDataParallel, over any backend.

    >>> net = torch.nn.parallel.DistributedDataParallel(Net())
    >>> hosts = lockstep.HostSync(net, every=8, wire_dtype=torch.bfloat16)
    >>> ...                        # the loop stays as it is
    >>> hosts.sync()               # before evaluating or saving

    On a slower network, DiLoCo sends a byte or half a byte for each parameter:

    >>> hosts = lockstep.HostSync(net, every=30, outer=lockstep.DiLoCo(payload="int8"))
    >>> hosts.with_global_copy(lambda: evaluate(net))

    Registers a communication hook, so no other can be registered. All ranks of the default group must construct it,
    with equal arguments, before the first forward; `ddp` must use the default group. Every rank has the same weight, so
    a host with more ranks weighs more. Threads: that of the training.

    Args:
        every: N > 1: gradients are averaged within each host only. At the next forward in training after N backward
            passes (those under no_sync() do not count), parameters and floating-point buffers are averaged between
            hosts: 1/N of the traffic. The states of the optimizer remain those of each host (Local SGD: Lin, Stich,
            Patel, Jaggi, 2018, https://arxiv.org/abs/1808.07217).
        outer: a DiLoCo or SparseLoCo, which takes the place of the mean of the parameters. Load weights before the
            first forward in training.
        wire_dtype: torch.bfloat16 or torch.float16: what is sent between hosts is rounded to it, and added in float32;
            within a host nothing is rounded. With `every=1` it requires the backend "lockstep" and parameters on the
            CPU; over Gloo and NCCL, torch's bf16_compress_hook rounds gradients between all ranks.

    Raises:
        UsageError: an argument is wrong, or both are the defaults, which would change nothing.
    """

    def __init__(
        self,
        ddp: nn.parallel.DistributedDataParallel,
        *,
        every: int = 1,
        wire_dtype: torch.dtype = torch.float32,
        outer: DiLoCo | SparseLoCo | None = None,
    ) -> None:
        _check(ddp, every, wire_dtype, outer)
        self.every, self.wire_dtype = every, wire_dtype
        self._ddp = weakref.ref(ddp)  # which keeps this object
        self._size = dist.get_world_size()
        self._backend = _lockstep_backend(ddp)
        if every == 1 and outer is None:
            self._averager: Any = None
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
        exchange = _HostExchange(hosts, self, outer is not None, None if _is_on_cpu(ddp) else "gloo")
        self._averager = _C.HostAverager(every, outer, exchange)
        ddp.register_comm_hook(self, _reduce_inside)
        ddp.register_forward_pre_hook(lambda ddp, _: self._sync_if_due(ddp))

    def sync(self) -> None:
        """Makes parameters and floating-point buffers equal on all hosts, with `every` above 1 or `outer`, of which it
        makes a round. Collective; blocks."""
        ddp = self._ddp()
        if self._averager is not None and ddp is not None:
            # A graph may have saved a buffer, which is no error, as in torch's own broadcast of buffers.
            self._averager.average(self._parameters(), [buffer.data for buffer in ddp.module.buffers()], False)

    def with_global_copy(self, body: Callable[[], _T]) -> _T:
        """With `outer`: calls body(), for example an evaluation, with the parameters that the hosts had in common after
        the last round, and then gives them their own values again. Returns what body() returns. The ranks of a host
        call it together. A round that is due, and would come with the next forward, comes first."""
        if self._averager is None:
            raise UsageError("HostSync: there is no outer optimizer; expected one, for with_global_copy()")
        if self._averager.is_due():
            self.sync()
        parameters = self._parameters()
        own = self._averager.swap_in_copy(parameters)
        try:
            return body()
        finally:
            self._averager.put_back(own, parameters)

    def state_dict(self) -> dict[str, Any]:
        """What this host needs to resume, besides its parameters and its optimizer, which differ between hosts. The
        ranks of a host call it together and get the same. A lockstep.checkpoint.TrainingState saves all of it."""
        return {} if self._averager is None else self._averager.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it, also with another number of hosts."""
        if self._averager is not None:
            self._averager.load_state_dict(state, self._parameters())

    def _parameters(self) -> list[torch.Tensor]:
        ddp = self._ddp()
        assert ddp is not None
        return [p.detach() for p in ddp.module.parameters() if p.is_floating_point() or p.is_complex()]

    def _sync_if_due(self, ddp: nn.Module) -> None:
        if ddp.training and torch.is_grad_enabled():
            if self._averager.is_due():
                self.sync()
            if self._averager.must_begin():
                self._averager.begin(self._parameters())

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


class _HostExchange(SimpleNamespace):
    """ddp::HostExchange of torch's groups. It does not keep `sync`, whose _averager keeps it."""

    def __init__(self, hosts: list[list[int]], sync: HostSync, has_outer: bool, backend: str | None) -> None:
        own, slices, several = sync._own, min(map(len, hosts)), len(hosts) > 1
        super().__init__(
            num_hosts=len(hosts),
            host=hosts.index(own),
            weights=[len(ranks) / sync._size for ranks in hosts],
            num_slices=slices,
            slice=own.index(dist.get_rank()),
            all_to_all=None,
            all_gather=None,
            share=None,
        )
        average = weakref.WeakMethod(sync._average)

        def average_if_alive(flat: torch.Tensor, equal_on_host: bool) -> None:
            if call := average():
                call(flat, equal_on_host)

        self.average = average_if_alive if several else None
        if not has_outer:
            return
        # All ranks make all groups.
        across = [dist.new_group([ranks[i] for ranks in hosts], backend=backend) for i in range(slices)]
        insides = (
            [dist.new_group(ranks, backend=backend) for ranks in hosts] if backend else [sync._inside] * len(hosts)
        )
        group, inside = across[min(self.slice, slices - 1)], insides[self.host]

        def all_to_all(output: torch.Tensor, given: torch.Tensor) -> Callable[[], object]:
            return dist.all_to_all_single(output, given, group=group, async_op=True).wait

        def all_gather(output: torch.Tensor, given: torch.Tensor) -> Callable[[], object]:
            return dist.all_gather(list(output.chunk(len(hosts))), given, group=group, async_op=True).wait

        def share(flat: torch.Tensor) -> None:
            for i, part in enumerate(flat.chunk(slices)):
                dist.broadcast(part, own[i], group=inside)

        if several:
            self.all_to_all, self.all_gather = all_to_all, all_gather
        if len(own) > 1:
            self.share = share


# Communication hooks, whose annotations torch compares with its own. Their results are the means of the buckets.


def _reduce_inside(state: HostSync, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if bucket.is_last():
        state._averager.count_reduction()
    flat = bucket.buffer().div_(len(state._own))
    work = dist.all_reduce(flat, group=state._inside, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _reduce_between_hosts(state: HostSync, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state._start_mean(bucket.buffer()).get_future().then(lambda future: future.value()[0])


def _check(ddp: Any, every: int, wire_dtype: torch.dtype, outer: Any) -> None:
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
    if every == 1 and wire_dtype == torch.float32 and outer is None:
        raise UsageError(
            "HostSync: every is 1 and wire_dtype is torch.float32, which changes nothing; expected another"
        )
    if not isinstance(outer, DiLoCo | SparseLoCo | None):
        raise UsageError(f"HostSync: outer is {outer!r}; expected a lockstep.DiLoCo, a lockstep.SparseLoCo or None")


def _is_on_cpu(ddp: nn.Module) -> bool:
    return all(p.device.type == "cpu" for p in ddp.parameters())


def _lockstep_backend(ddp: nn.Module) -> Any:
    """The backend lockstep of the default group, if it reduces the module's tensors itself."""
    if not _is_on_cpu(ddp):
        return None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return backend if isinstance(backend, _C.ProcessGroupLockstep) else None


def _ranks_of_hosts() -> list[list[int]]:
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, _C.host_id())
    return [[rank for rank, own in enumerate(names) if own == name] for name in dict.fromkeys(names)]
