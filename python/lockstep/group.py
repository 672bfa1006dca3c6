"""init(), groups of ranks, and the operations between them."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import _C, _engine, _failures, _fork_copies, _process_group, _step_counts
from lockstep.errors import UsageError

_OPS = _C.ReduceOp.__members__


def _op(name: str) -> _C.ReduceOp:
    try:
        return _OPS[name]
    except KeyError:
        raise UsageError(f'op is {name!r}; expected one of "{", ".join(_OPS)}"') from None


class Work:
    """An operation that runs asynchronously. Its tensors must not be read or written before it is done."""

    def __init__(self, work: _C.Work, tensors: tuple[Tensor | None, ...]) -> None:
        self._work, self._tensors = work, tensors  # keeps Python's objects of the tensors

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the operation is done, at the latest when its own timeout, or that of init(), ends it. Raises
        its error; TimeoutError after `timeout` seconds, after which the operation goes on and can be waited for again.
        """
        self._work.wait(timeout)

    def done(self) -> bool:
        """Whether the operation is done, also if it failed. Does not block."""
        return self._work.done()


class Group:
    """A group of ranks. init() returns the one of all ranks, split() smaller ones.

    All ranks of a group make the same calls in the same order. Before data moves, the ranks compare kind, dtype, shape,
    root, operator and name of each call: if they differ, every rank raises DesyncError, which names two ranks and both
    calls. A wait for a rank that died, left, or waits in another operation ends with an error within about a second,
    and every other one with TimeoutError. Then the group is closed, and later calls raise the same error.

    Every operation has two forms: one that blocks until this rank's tensors have the result, and NAME_async(), which
    returns a Work at once. Waits release the GIL, and Ctrl-C ends them. One thread at a time uses a group.

    Tensors: float64, float32, float16, bfloat16, int64, int32, int8, uint8, bool, on the CPU or on this rank's GPU,
    with any strides. Every operation accepts `name`, which error messages show and which must be equal on all ranks,
    and `timeout` in seconds, after which it raises TimeoutError. The result has the same bits on every rank.
    """

    _CLOSE_ORDER = 2

    def __init__(self, group: _C.Group) -> None:
        self._group = group
        _failures.add_owner(self)

    def _close(self) -> None:
        del self._group

    def __repr__(self) -> str:
        return f"<lockstep.Group {self.name}: rank {self.rank} of {self.size}, {self.transport}>"

    @property
    def rank(self) -> int:
        """This process's rank, from 0 to size - 1."""
        return self._group.rank()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._group.size()

    @property
    def local_rank(self) -> int:
        """The index of this process among the ranks of its host."""
        return self._group.local_rank()

    @property
    def local_size(self) -> int:
        """The number of ranks on this host."""
        return self._group.local_size()

    @property
    def node_rank(self) -> int:
        """The index of this rank's host."""
        return self._group.node_rank()

    @property
    def num_nodes(self) -> int:
        """The number of hosts."""
        return self._group.num_nodes()

    @property
    def device(self) -> torch.device:
        """The device of this rank: a GPU of its own if there is one, else the CPU."""
        return self._group.device()

    @property
    def name(self) -> str:
        """The group's name in messages: "world", "world.1[0]", ..."""
        return self._group.name()

    @property
    def transport(self) -> str:
        """The transport for CPU tensors: "shm", "hierarchy", "tcp", "mpi" or "self"."""
        return self._group.transport()

    def global_rank(self, rank: int) -> int:
        """Returns the rank in the world of this group's rank `rank`."""
        return self._group.global_rank(rank)

    def all_reduce(
        self,
        tensor: Tensor,
        op: str = "sum",
        *,
        name: str = "",
        timeout: float | None = None,
        wire_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Reduces `tensor` over all ranks, in place. `op`: "sum", "mean", "product", "min" or "max". `wire_dtype`, for
        float32 between hosts: float32, bfloat16, float16, or for "sum" and "mean" int8, as which each host's sum is
        sent."""
        self._group.all_reduce(tensor, _op(op), name, timeout, wire_dtype)

    def all_reduce_async(
        self,
        tensor: Tensor,
        op: str = "sum",
        *,
        name: str = "",
        timeout: float | None = None,
        wire_dtype: torch.dtype = torch.float32,
    ) -> Work:
        """Starts all_reduce()."""
        return Work(self._group.all_reduce_async(tensor, _op(op), name, timeout, wire_dtype), (tensor,))

    def reduce(
        self, tensor: Tensor, root: int, op: str = "sum", *, name: str = "", timeout: float | None = None
    ) -> None:
        """Reduces to rank `root`. On the others, `tensor` is undefined afterwards."""
        self._group.reduce(tensor, root, _op(op), name, timeout)

    def reduce_async(
        self, tensor: Tensor, root: int, op: str = "sum", *, name: str = "", timeout: float | None = None
    ) -> Work:
        """Starts reduce()."""
        return Work(self._group.reduce_async(tensor, root, _op(op), name, timeout), (tensor,))

    def broadcast(self, tensor: Tensor, root: int, *, name: str = "", timeout: float | None = None) -> None:
        """Copies rank `root`'s tensor into all others."""
        self._group.broadcast(tensor, root, name, timeout)

    def broadcast_async(self, tensor: Tensor, root: int, *, name: str = "", timeout: float | None = None) -> Work:
        """Starts broadcast()."""
        return Work(self._group.broadcast_async(tensor, root, name, timeout), (tensor,))

    def all_gather(self, output: Tensor, input: Tensor, *, name: str = "", timeout: float | None = None) -> None:
        """Concatenates the ranks' inputs in the order of ranks. `output` has `size` times as many elements."""
        self._group.all_gather(output, input, name, timeout)

    def all_gather_async(self, output: Tensor, input: Tensor, *, name: str = "", timeout: float | None = None) -> Work:
        """Starts all_gather()."""
        return Work(self._group.all_gather_async(output, input, name, timeout), (output, input))

    def all_gather_unequal(self, input: Tensor, *, name: str = "", timeout: float | None = None) -> list[Tensor]:
        """Returns the inputs of all ranks, whose shapes may differ; the dtype must be equal."""
        return self._group.all_gather_unequal(input, name, timeout)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: str = "sum", *, name: str = "", timeout: float | None = None
    ) -> None:
        """Splits `input` into `size` equal parts; rank r gets the reduction of the r-th ones."""
        self._group.reduce_scatter(output, input, _op(op), name, timeout)

    def reduce_scatter_async(
        self, output: Tensor, input: Tensor, op: str = "sum", *, name: str = "", timeout: float | None = None
    ) -> Work:
        """Starts reduce_scatter()."""
        return Work(self._group.reduce_scatter_async(output, input, _op(op), name, timeout), (output, input))

    def gather(
        self, output: Tensor | None, input: Tensor, root: int, *, name: str = "", timeout: float | None = None
    ) -> None:
        """all_gather() to rank `root` only; `output` is ignored on the others and may be None there."""
        self._group.gather(output, input, root, name, timeout)

    def gather_async(
        self, output: Tensor | None, input: Tensor, root: int, *, name: str = "", timeout: float | None = None
    ) -> Work:
        """Starts gather()."""
        return Work(self._group.gather_async(output, input, root, name, timeout), (output, input))

    def scatter(
        self, output: Tensor, input: Tensor | None, root: int, *, name: str = "", timeout: float | None = None
    ) -> None:
        """Splits the input of rank `root` into `size` equal parts; rank r gets the r-th. `input` is ignored on the
        other ranks and may be None there."""
        self._group.scatter(output, input, root, name, timeout)

    def scatter_async(
        self, output: Tensor, input: Tensor | None, root: int, *, name: str = "", timeout: float | None = None
    ) -> Work:
        """Starts scatter()."""
        return Work(self._group.scatter_async(output, input, root, name, timeout), (output, input))

    def all_to_all(self, output: Tensor, input: Tensor, *, name: str = "", timeout: float | None = None) -> None:
        """Splits both tensors into `size` equal parts; part p of `input` goes to rank p."""
        self._group.all_to_all(output, input, name, timeout)

    def all_to_all_async(self, output: Tensor, input: Tensor, *, name: str = "", timeout: float | None = None) -> Work:
        """Starts all_to_all()."""
        return Work(self._group.all_to_all_async(output, input, name, timeout), (output, input))

    def send(self, tensor: Tensor, to: int, *, name: str = "", timeout: float | None = None) -> None:
        """Sends to one rank, which compares dtype, shape and name of both calls before it accepts data."""
        self._group.send(tensor, to, name, timeout)

    def send_async(self, tensor: Tensor, to: int, *, name: str = "", timeout: float | None = None) -> Work:
        """Starts send()."""
        return Work(self._group.send_async(tensor, to, name, timeout), (tensor,))

    def recv(self, tensor: Tensor, source: int, *, name: str = "", timeout: float | None = None) -> None:
        """Receives from one rank. Messages between two ranks arrive in the order in which they were sent."""
        self._group.recv(tensor, source, name, timeout)

    def recv_async(self, tensor: Tensor, source: int, *, name: str = "", timeout: float | None = None) -> Work:
        """Starts recv()."""
        return Work(self._group.recv_async(tensor, source, name, timeout), (tensor,))

    def recv_any(self, tensor: Tensor, *, name: str = "", timeout: float | None = None) -> int:
        """Receives from the rank that sends to this one first, and returns its rank. Raises CommError when all other
        ranks have finished."""
        return self._group.recv_any(tensor, name, timeout)

    def barrier(self, *, name: str = "", timeout: float | None = None) -> None:
        """Blocks until all ranks have called it. Does not synchronize GPUs."""
        self._group.barrier(name, timeout)

    def barrier_async(self, *, name: str = "", timeout: float | None = None) -> Work:
        """Starts barrier()."""
        return Work(self._group.barrier_async(name, timeout), ())

    def broadcast_object(self, value: Any, root: int, *, name: str = "", timeout: float | None = None) -> Any:
        """Returns rank `root`'s `value`; it is ignored on the others. Values are numbers, strings, None, tensors, and
        tuples, lists, dicts and sets of them, of at most 1 GiB. Objects of other classes raise UsageError: to receive
        them would run code that another process chooses."""
        own = _encode(value) if self.rank == root else b""
        return _decode(self._group.broadcast_bytes(own, root, name, timeout))

    def all_gather_object(self, value: Any, *, name: str = "", timeout: float | None = None) -> list[Any]:
        """Returns the values of all ranks, in the order of ranks. See broadcast_object()."""
        return [_decode(data) for data in self._group.all_gather_bytes(_encode(value), name, timeout)]

    def split(self, color: int, key: int = 0) -> Group:
        """Returns the group of the ranks that passed the same `color` (0 or more), ordered by (key, rank). Blocks until
        all ranks have called it."""
        return Group(self._group.split(color, key))

    def split_by_host(self) -> Group:
        """Returns the group of the ranks on this host. Blocks until all ranks have called it."""
        return Group(self._group.split_by_host())

    def step(self) -> None:
        """Ends a step, which this group counts. Checks of reductions use its number. A loop that never calls it is
        counted by the backward() of its first model."""
        self._group.step()

    @property
    def steps(self) -> int:
        """How many steps have ended."""
        return self._group.steps()

    @property
    def comm_seconds(self) -> float:
        """How long the calling thread has been in operations between ranks, of all groups and models together: waiting
        for other ranks, sending and receiving. Its growth in a step, divided by the step's time, is what the exchange
        costs. What streams of a GPU wait for is not seen, nor are blocking operations of a group that has used a
        GPU."""
        return self._group.comm_seconds()

    def alive(self) -> None:
        """Reports that long work of this rank makes progress. Steps and operations do so by themselves."""
        self._group.alive()

    def busy(self, what: str) -> _Busy:
        """Reports progress while a `with` block runs, such as an evaluation on one rank:

        >>> with world.busy("evaluate"):
        ...     evaluate(net)
        """
        return _Busy(self._group, what)

    def stop_requested(self) -> bool:
        """Whether all ranks should save and exit, because one has received SIGTERM, SIGUSR1 or Ctrl-C since its first
        call of this method, which installs handlers. All ranks get the same answer in the same step. Then save, and
        exit with 75 (lockstep.PREEMPTED). A second Ctrl-C raises KeyboardInterrupt; so does the first one before that
        call. A handler of the program's own for SIGINT stays. Children made by fork() do not have these handlers."""
        return self._group.stop_requested()


class _Busy:
    """The block of Group.busy(), which may be entered again."""

    def __init__(self, group: _C.Group, what: str) -> None:
        self._group, self._what = group, what
        self._scopes: list[_C.BusyScope] = []

    def __enter__(self) -> _Busy:
        self._scopes.append(self._group.busy(self._what))
        return self

    def __exit__(self, *error: object) -> None:
        self._scopes.pop()


def _encode(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    try:
        _decode(file.getvalue())
    except UsageError:
        raise UsageError(
            f"a value of {type(value).__qualname__} has objects that cannot be received safely; expected numbers, "
            "strings, None, tensors, and tuples, lists, dicts and sets of them"
        ) from None
    return file.getvalue()


def _decode(data: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        raise UsageError(f"received bytes that are not an accepted value: {error}") from None


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str = "",
    env_from: str = "",
    transport: str = "",
    device: str = "",
    cross_host_transport: str = "",
    arena: bool | None = None,
    join_timeout: float | None = None,
    timeout: float | None = None,
) -> Group:
    """Joins the job and returns the group of all ranks; blocks until all have joined.

    The defaults fit a program that `lockstep run`, srun, mpirun or torchrun starts, or nobody: then it is a world of
    one rank. Call it before the first CPU tensors are made: later ones are in memory that the ranks of a host share.
    After init_process_group(), as in a worker of Ray Train, the ranks are those of the default process group.

    Args:
        rank, world_size, address: replace the launcher's variables; address is "host:port" of rank 0.
        env_from: whose variables: "auto", "none", "lockstep", "torchrun", "mpi", "slurm", "pmi" or "pod".
        transport: "auto", "self", "shm", "hierarchy", "tcp", "mpi" or "nccl".
        device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N".
        cross_host_transport: "auto", "tcp" or "mpi", between hosts.
        arena: whether later CPU tensors are in shared memory.
        join_timeout: seconds to wait for all ranks (60; in pods and with plain RANK and WORLD_SIZE 600).
        timeout: seconds to wait for ranks that make no progress (300); 0: no limit.

    Raises:
        UsageError: incomplete or contradictory variables.
        CommError: not all ranks joined (cause JOIN_TIMEOUT), or they differ (CONFIG_MISMATCH).
    """
    options = (transport, device, cross_host_transport, arena, join_timeout, timeout)
    is_given = (rank, world_size, address, env_from) != (None, None, "", "")
    store = None if is_given else _process_group.default_store()
    if store is not None:
        return joined(_process_group.init(dist.get_rank(), dist.get_world_size(), store, *options))
    return joined(_C.init(rank, world_size, address, env_from, *options))


_world: weakref.ref[Group] | None = None


def world() -> Group | None:
    """The world that this process has joined, while its group exists. Private to the package."""
    return _world() if _world is not None else None


when_joined: list[Callable[[], None]] = [_engine.install, _fork_copies.install, _step_counts.install]
"""Called once, when the process has joined its first world: what replaces functions of torch, or adds hooks to them.
Private to the package."""


def joined(group: _C.Group) -> Group:
    """What every process does that has joined a world. Private to the package."""
    global _world
    while when_joined:
        when_joined.pop(0)()
    _failures.install()  # each time: a child made by fork() may join a world of its own
    made = Group(group)
    _world = weakref.ref(made)
    return made
