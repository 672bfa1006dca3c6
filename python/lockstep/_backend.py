"""The backend "lockstep" of torch.distributed: a Group for each process group."""

from __future__ import annotations

import collections
import functools
import os
from typing import Any

import torch
import torch.distributed as dist

from lockstep import _C, _failures, _process_group, _step_counts, group
from lockstep.errors import UsageError

_world: group.Group | None = None  # of the default process group; a process has one
_num_defaults = 0  # default process groups that this process has made
_num_made: collections.Counter[str] = collections.Counter()  # process groups since then, by name


class _Backends:
    """Closes the process groups that a program has not destroyed, when it ends."""

    _CLOSE_ORDER = 1  # before the world

    def _close(self) -> None:
        _C.close_backends()


_backends = _Backends()


def create(options: Any, backend_options: Any) -> Any:
    """Called by torch.distributed on each rank of a new process group. `options`: its DistributedBackendOptions."""
    rank, size, name = options.group_rank, options.group_size, options.group_id
    seconds = options.timeout.total_seconds()
    ranks = list(options.global_ranks_in_group) or list(range(size))
    world = _join_world(rank, size, options.store, seconds)
    # Names are used again: after destroy_process_group() for other ranks, before it for the same ones.
    global _num_defaults
    if not dist.is_initialized():
        _num_defaults += 1
        _num_made.clear()
    number = f"{_num_defaults}.{_num_made[name]}"
    _num_made[name] += 1
    _failures.add_owner(_backends)
    device, inner = _device_backend(options, backend_options, ranks)
    return _C.make_backend(world._group, f"c10d.{name}.{number}", ranks, seconds, device, inner)


def _own_backends(model: Any) -> set[Any]:
    """Those of the process group of torch's DistributedDataParallel `model`."""
    group = model.process_group
    found = {group._get_backend(device) for device in group._device_types}
    return {backend for backend in found if isinstance(backend, _C.ProcessGroupLockstep)}


def _count_step(model: Any) -> None:
    for backend in _own_backends(model):
        backend.count_optimizer_step()


def _watch_models() -> None:
    """Counts the steps of models that torch's DistributedDataParallel makes from now on."""
    kind: Any = torch.nn.parallel.DistributedDataParallel

    def watch(model: Any) -> None:
        if _own_backends(model):
            _step_counts.watch(model, model.parameters(), _count_step)

    _step_counts.when_made(kind, watch)

    def without_counts(function: Any) -> Any:
        @functools.wraps(function)
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            for backend in _own_backends(self):
                backend.stop_counting_steps()
            return function(self, *arguments, **options)

        return call

    # A hook may start operations in callbacks, and a rank that has joined starts them outside backward().
    for name in ("register_comm_hook", "_register_builtin_comm_hook", "join_hook"):
        setattr(kind, name, without_counts(getattr(kind, name)))


_watch_models()


def _device_backend(options: Any, backend_options: Any, ranks: list[int]) -> tuple[str | None, Any]:
    """The type of device whose tensors another backend serves, and that backend: torch's NCCL, if there is a GPU."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        if backend_options is not None:
            raise UsageError("the backend lockstep has pg_options only for GPUs, those of ProcessGroupNCCL")
        return None, None
    nccl = backend_options or dist.ProcessGroupNCCL.Options()
    nccl._timeout = options.timeout
    nccl.group_name = options.group_id
    nccl.global_ranks_in_group = ranks
    parent = _split_source()
    if parent is not None:
        nccl.split_from = parent
        nccl.split_color = dist.distributed_c10d._process_group_color(ranks)
    inner = dist.ProcessGroupNCCL(options.store, options.group_rank, options.group_size, nccl)
    inner._set_sequence_number_for_group()
    return "cuda", inner


def _split_source() -> Any:
    """The NCCL of the default group, if it is connected and can be split, as init_process_group(device_id=...) makes
    it."""
    if not dist.is_initialized() or dist.group.WORLD is None or dist.group.WORLD.bound_device_id is None:
        return None
    backend = dist.group.WORLD._get_backend(dist.group.WORLD.bound_device_id)
    inner = backend.device_backend() if isinstance(backend, _C.ProcessGroupLockstep) else None
    return inner if inner is not None and inner.supports_splitting else None


def _join_world(rank: int, size: int, store: Any, seconds: float) -> group.Group:
    """Returns the world. The first process group makes it, of all its ranks."""
    global _world
    if _world is None and dist.is_initialized():
        raise UsageError(
            'new_group(backend="lockstep") requires that the default group has this backend for the CPU: '
            'init_process_group("lockstep"), or init_process_group("cpu:lockstep,cuda:nccl")'
        )
    if _world is None:
        _world = group.world()  # of a program that has called lockstep.init()
    launched = (os.environ.get("LOCKSTEP_RANK"), os.environ.get("LOCKSTEP_WORLD_SIZE"))
    if _world is None and launched == (str(rank), str(size)):  # the launcher then watches the rank
        _world = group.init(device="cpu", join_timeout=seconds, timeout=seconds)
    if _world is None:
        _world = group.joined(_process_group.init(rank, size, store, "", "cpu", "", None, seconds, seconds))
    if not dist.is_initialized() and (_world.rank, _world.size) != (rank, size):
        raise UsageError(
            f"this process is rank {_world.rank} of {_world.size} of its world, and cannot become rank {rank} of {size}"
        )
    return _world
