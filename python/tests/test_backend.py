"""The backend "lockstep" of torch.distributed: every operation, groups, DistributedDataParallel and FSDP of torch, and
errors."""

import datetime
import os
import subprocess
import sys
import tempfile
import textwrap

import _lockstep_backend
import pytest
import torch
import torch.distributed as dist
from process_group import process_group
from ranks import on_ranks
from torch import nn

import lockstep

SIZES = (1, 2, 3, 4)
_lockstep_backend.register()


def whole(size, *shape, dtype=torch.float32):
    """The inputs of all ranks; values that all dtypes hold."""
    count = torch.Size(shape).numel()
    return [(torch.arange(count).view(shape) % 5 + rank + 1).to(dtype) for rank in range(size)]


def same(tensor, expected):
    assert torch.equal(tensor, expected), (tensor, expected)


@on_ranks(*SIZES)
def test_reductions(world):
    with process_group() as (rank, size):
        for dtype in (
            torch.float32,
            torch.float64,
            torch.bfloat16,
            torch.float16,
            torch.int64,
            torch.int32,
            torch.uint8,
        ):
            inputs = whole(size, 3, 4, dtype=dtype)
            stacked = torch.stack(inputs)
            for op, expected in (
                (dist.ReduceOp.SUM, stacked.sum(0, dtype=dtype)),
                (dist.ReduceOp.MAX, stacked.amax(0)),
                (dist.ReduceOp.MIN, stacked.amin(0)),
                (dist.ReduceOp.PRODUCT, stacked.prod(0, dtype=dtype)),
            ):
                tensor = inputs[rank].clone()
                dist.all_reduce(tensor, op)
                same(tensor, expected)
                transposed = inputs[rank].t().clone().t().t()
                work = dist.all_reduce(transposed, op, async_op=True)
                work.wait()
                same(transposed, expected.t())
                for root in range(size):
                    tensor = inputs[rank].clone()
                    dist.reduce(tensor, root, op)
                    if rank == root:
                        same(tensor, expected)
        tensor = torch.full((2,), float(rank))
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        same(tensor, torch.full((2,), (size - 1) / 2))
        for op, expected in (
            (dist.ReduceOp.BOR, (1 << size) - 1),
            (dist.ReduceOp.BAND, 1 if size == 1 else 0),
            (dist.ReduceOp.BXOR, (1 << size) - 1),
        ):
            bits = torch.tensor([1 << rank])
            dist.all_reduce(bits, op)
            same(bits, torch.tensor([expected]))
        lists = [torch.full((2,), float(rank)), torch.full((3, 2), 1.0)]
        dist.all_reduce_coalesced(lists)
        same(lists[0], torch.full((2,), float(sum(range(size)))))
        same(lists[1], torch.full((3, 2), float(size)))
        sparse = torch.sparse_coo_tensor(torch.tensor([[rank, rank + 1]]), torch.ones(2), (size + 1,))
        dist.all_reduce(sparse)
        expected = torch.ones(size + 1) * 2
        expected[0] = expected[-1] = 1
        same(sparse.to_dense(), expected)


@on_ranks(*SIZES)
def test_copies_of_every_dtype(world):
    with process_group() as (rank, size):
        for dtype in (torch.float32, torch.int16, torch.complex64, torch.bool, torch.float8_e4m3fn, torch.bfloat16):
            inputs = [tensor.to(dtype) for tensor in whole(size, 2, 3)]
            bytes_of = [tensor.view(torch.uint8) for tensor in inputs]
            for root in range(size):
                tensor = inputs[rank].clone()
                dist.broadcast(tensor, root)
                same(tensor.view(torch.uint8), bytes_of[root])
            outputs = [torch.empty(2, 3, dtype=dtype) for _ in range(size)]
            dist.all_gather(outputs, inputs[rank])
            for output, expected in zip(outputs, bytes_of):
                same(output.view(torch.uint8), expected)


@on_ranks(*SIZES)
def test_gathers_and_scatters(world):
    with process_group() as (rank, size):
        inputs = whole(size, 2, 3)
        flat = torch.empty(2 * size, 3)
        dist.all_gather_into_tensor(flat, inputs[rank])
        same(flat, torch.cat(inputs))
        wide = whole(size, size * 2, 3)
        total = torch.stack(wide).sum(0)
        part = torch.empty(2, 3)
        dist.reduce_scatter_tensor(part, wide[rank])
        same(part, total.chunk(size)[rank])
        part.zero_()
        dist.reduce_scatter(part, list(wide[rank].chunk(size)))
        same(part, total.chunk(size)[rank])
        for root in range(size):
            outputs = [torch.empty(2, 3) for _ in range(size)] if rank == root else None
            dist.gather(inputs[rank], outputs, root)
            if rank == root:
                same(torch.stack(outputs), torch.stack(inputs))
            dist.scatter(part, inputs if rank == root else None, root)
            same(part, inputs[rank])
        received = torch.empty(size * 2, 3)
        dist.all_to_all_single(received, wide[rank])
        same(received, torch.cat([one.chunk(size)[rank] for one in wide]))
        # Rank r sends p + 1 rows to rank p.
        sent = torch.full((size * (size + 1) // 2, 2), float(rank))
        received = torch.empty(size * (rank + 1), 2)
        dist.all_to_all_single(received, sent, [rank + 1] * size, [to + 1 for to in range(size)])
        same(received, torch.arange(size).repeat_interleave(rank + 1).float()[:, None].expand(-1, 2))
        outputs = [torch.empty(rank + 1) for _ in range(size)]
        dist.all_to_all(outputs, [torch.full((to + 1,), float(rank)) for to in range(size)])
        same(torch.stack(outputs), torch.arange(size).float()[:, None].expand(-1, rank + 1))
        # In several rounds, to one rank only, and from it to none; the output has another layout.
        rows = 900_000 if rank == 0 else 0
        received = torch.empty(3, 900_000 if rank == 1 else 0).t()
        sent = torch.arange(3 * rows).float().view(rows, 3)
        dist.all_to_all(
            [received if one == 0 else torch.empty(0, 3) for one in range(size)],
            [sent if to == 1 else torch.empty(0, 3) for to in range(size)],
        )
        same(received, torch.arange(3 * received.shape[0]).float().view(-1, 3))
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
        assert objects == [{"rank": one, "text": "x" * one} for one in range(size)]
        values = [("a", 1), 2] if rank == 0 else [None, None]
        dist.broadcast_object_list(values, 0)
        assert values == [("a", 1), 2]
        dist.barrier()


@on_ranks(2, 3, 4)
def test_point_to_point(world):
    with process_group() as (rank, size):
        to, source = (rank + 1) % size, (rank - 1) % size
        work = dist.isend(torch.full((3,), float(rank)), to, tag=2)
        received = torch.empty(2, 3).t()[:, 0]
        dist.recv(received, source, tag=2)
        work.wait()
        same(received, torch.full((3,), float(source)))
        operations = [
            dist.P2POp(dist.isend, torch.full((4,), rank), to),
            dist.P2POp(dist.irecv, got := torch.empty(4, dtype=torch.int64), source),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        same(got, torch.full((4,), source))


@on_ranks(2, 3)
def test_messages_from_any_rank(world):
    with process_group() as (rank, size):
        if rank > 0:
            dist.send(torch.full((3,), float(rank)), 0)
            dist.send(torch.full((3,), float(rank)), 0)
            return
        sources = []
        for index in range(2 * (size - 1)):
            received = torch.empty(2, 3).t()[:, 0]
            if index % 2 == 0:
                sources.append(dist.recv(received))
            else:
                work = dist.irecv(received)
                work.wait()
                sources.append(work._source_rank())
            same(received, torch.full((3,), float(sources[-1])))
        assert sorted(sources) == sorted(2 * list(range(1, size)))


@on_ranks(1, 2, 3)
def test_monitored_barrier(world):
    """A rank that does not come is named, and the group goes on."""
    with process_group() as (rank, size):
        dist.group.WORLD.monitored_barrier(timeout=datetime.timedelta(seconds=30))
        if size > 1 and rank < size - 1:
            with pytest.raises(lockstep.TimeoutError, match=f"Ranks? {size - 1} failed to pass monitoredBarrier"):
                dist.group.WORLD.monitored_barrier(timeout=datetime.timedelta(seconds=0.2), wait_all_ranks=True)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        same(tensor, torch.full((2,), float(size)))


@on_ranks(2, 3)
def test_dtypes_that_are_no_numbers_here(world):
    """They move as bytes, and are not reduced."""
    with process_group() as (rank, size):
        for dtype in (torch.int16, torch.uint32):
            tensor = torch.ones(3, dtype=dtype)
            dist.broadcast(tensor, 0)
            dist.broadcast(torch.ones(0, dtype=dtype), 0)
            with pytest.raises(lockstep.UsageError, match="reduce: the dtype is"):
                dist.reduce(tensor, 0)
            with pytest.raises(lockstep.UsageError, match="reduce_scatter: the dtype is"):
                dist.reduce_scatter_tensor(torch.ones(1, dtype=dtype), torch.ones(size, dtype=dtype))
        with pytest.raises(lockstep.UsageError, match="all_reduce: the dtype is Short"):
            dist.all_reduce(torch.ones(3, dtype=torch.int16))
        with pytest.raises(lockstep.UsageError, match="integers for BAND"):
            dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)
        bits = torch.full((2,), 256 + rank, dtype=torch.int16)
        dist.all_reduce(bits, dist.ReduceOp.BOR)
        same(bits, torch.full((2,), 256 + (1 if size == 2 else 3), dtype=torch.int16))
        got = [torch.empty(1 + one, dtype=torch.int16) for one in range(size)]
        dist.all_to_all(got, [torch.full((1 + rank,), rank, dtype=torch.int16) for _ in range(size)])
        assert [one.tolist() for one in got] == [[one] * (1 + one) for one in range(size)]


@on_ranks(2, 3)
def test_callbacks_and_parameters(world):
    """A callback of a future starts another operation; results go to parameters that are not contiguous."""
    with process_group() as (rank, size):
        tensor, later = torch.ones(3), torch.full((2,), float(rank))

        def follow(future):
            dist.all_reduce(later)
            return future.value()

        futures = [dist.all_reduce(tensor, async_op=True).get_future().then(follow)]
        torch.futures.wait_all(futures)
        same(tensor, torch.full((3,), float(size)))
        same(later, torch.full((2,), float(sum(range(size)))))
        parameter = nn.Parameter(torch.full((2, 3), float(rank)).t())
        dist.broadcast(parameter, 0)
        same(parameter.detach(), torch.zeros(3, 2))


@on_ranks(3)
def test_groups_of_another_default_group(world):
    """torch uses the names of groups again, for other ranks."""
    for members in ([0, 1], [0, 1, 2], [1, 2]):
        with process_group() as (rank, size):
            group = dist.new_group(members)
            if rank in members:
                tensor = torch.ones(1)
                dist.all_reduce(tensor, group=group)
                assert tensor.item() == len(members)


@on_ranks(2)
def test_profiler_names_operations(world):
    with process_group(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(3))
        dist.barrier()
    assert {"lockstep:all_reduce", "lockstep:barrier"} <= {event.name for event in profile.events()}


@on_ranks(3, 4)
def test_groups(world):
    with process_group() as (rank, size):
        first = dist.new_group([0, size - 1])
        second = dist.new_group([size - 1, 1])
        tensor = torch.full((2,), float(rank))
        if rank in (0, size - 1):
            dist.all_reduce(tensor, group=first)
            same(tensor, torch.full((2,), float(size - 1)))
        if rank in (1, size - 1):
            value = torch.full((2,), float(rank))
            dist.broadcast(value, 1, group=second)
            same(value, torch.ones(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def train(net, rank, steps=5):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        net(torch.randn(8, 6, generator=generator)).square().mean().backward()
        optimizer.step()


@on_ranks(1, 2, 4)
def test_ddp_of_torch(world):
    """The same weights as over Gloo."""
    with process_group() as (rank, size):
        gloo = dist.new_group(backend="gloo")
        found = []
        for group in (None, gloo):
            for options in (
                {},
                {"gradient_as_bucket_view": True, "static_graph": True},
                {"find_unused_parameters": True},
            ):
                torch.manual_seed(1)
                net = Net()
                train(nn.parallel.DistributedDataParallel(net, process_group=group, **options), rank)
                found.append(torch.cat([one.detach().reshape(-1) for one in net.parameters()]))
        for one in found[1:]:
            assert torch.allclose(one, found[0], atol=1e-6)


@on_ranks(2, 4)
def test_fsdp_and_dtensor(world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    with process_group() as (rank, size):
        mesh = init_device_mesh("cpu", (size,))
        values = torch.arange(4.0 * size).view(size, 4)
        sharded = distribute_tensor(values, mesh, [Shard(0)])
        same((sharded * 2).full_tensor(), values * 2)
        torch.manual_seed(1)
        net, plain = nn.Linear(6, 8 * size), nn.Linear(6, 8 * size)
        plain.load_state_dict(net.state_dict())
        fully_shard(net, mesh=mesh)
        train(net, 0)
        train(plain, 0)
        assert torch.allclose(net.weight.full_tensor(), plain.weight, atol=1e-6)


@on_ranks(2, 3)
def test_distributed_checkpoint(world):
    """Saved by all ranks from shards, and loaded into shards of other values."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with process_group() as (rank, size), tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder, 0)
        torch.manual_seed(1)
        saved, loaded = nn.Linear(6, 5), nn.Linear(6, 5)
        expected = saved.weight.detach().clone()
        for net in (saved, loaded):
            fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
        dcp.save(get_model_state_dict(saved), checkpoint_id=folder[0])
        state = get_model_state_dict(loaded)
        dcp.load(state, checkpoint_id=folder[0])
        same(loaded.weight.full_tensor(), expected)
        dist.barrier()


@on_ranks(2, 3)
def test_zero_redundancy_optimizer(world):
    """The same weights as with an optimizer whose state is on every rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with process_group() as (rank, size):
        found = []
        for make in (
            lambda parameters: ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01),
            lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        ):
            torch.manual_seed(1)
            net = nn.parallel.DistributedDataParallel(Net())
            optimizer = make(net.parameters())
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.randn(8, 6) + rank).square().mean().backward()
                optimizer.step()
            found.append(torch.cat([one.detach().reshape(-1) for one in net.parameters()]))
        assert torch.allclose(found[0], found[1], atol=1e-6)


@on_ranks(2)
def test_older_fsdp(world):
    from torch.distributed.fsdp import FullyShardedDataParallel

    with process_group() as (rank, size):
        torch.manual_seed(1)
        net, plain = nn.Linear(6, 8), nn.Linear(6, 8)
        plain.load_state_dict(net.state_dict())
        sharded = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
        train(sharded, 0)
        train(plain, 0)
        with FullyShardedDataParallel.summon_full_params(sharded):
            assert torch.allclose(net.weight, plain.weight, atol=1e-6)


@on_ranks(2, fresh=True)
def test_different_calls(world):
    with pytest.raises(lockstep.DesyncError, match="broadcast") as caught, process_group() as (rank, size):
        dist.all_reduce(torch.ones(3)) if rank == 0 else dist.broadcast(torch.ones(3), 0)
    assert caught.value.cause == "DESYNC"


SPAWNED = """\
import sys, _lockstep_backend, torch, torch.distributed as dist, torch.multiprocessing as mp
def rank_main(rank, file):
    _lockstep_backend.register()
    dist.init_process_group("lockstep", init_method="file://" + file, rank=rank, world_size=3)
    tensor = torch.ones(2) * rank
    dist.all_reduce(tensor)
    sys.stdout.write(f"sum {tensor[0].item()}\\n")  # no destroy_process_group(): many programs have none
if __name__ == "__main__":
    mp.spawn(rank_main, (sys.argv[1],), 3)
"""


def test_processes_without_a_launcher(tmp_path):
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    done = subprocess.run(
        [sys.executable, script, tmp_path / "store"], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3.0") == 3


FAILING = """\
import _lockstep_backend, torch, torch.distributed as dist
_lockstep_backend.register()
dist.init_process_group("lockstep")
if dist.get_rank() == 1:
    raise LookupError("no such batch")
dist.all_reduce(torch.ones(2))
"""


def test_exception_is_named(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = subprocess.run(
        [os.environ["LOCKSTEP_PROGRAM"], "run", "-n", "2", "--bind", "none", sys.executable, script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    fatal = done.stderr.strip().splitlines()[-1]
    assert fatal.startswith("FATAL cause=RANK_EXITED rank=1 ") and "LookupError: no such batch" in fatal


def test_registration_never_fails(tmp_path):
    """`import torch` runs it, so an installation that is broken must not break torch."""
    (tmp_path / "lockstep").mkdir()
    (tmp_path / "lockstep/__init__.py").write_text("raise ImportError('broken')")
    program = textwrap.dedent(
        """\
        import time, sys, torch
        before = set(sys.modules)
        import _lockstep_backend
        start = time.process_time()
        _lockstep_backend.register()
        assert time.process_time() - start < 0.1
        assert not any(name.partition(".")[0] == "lockstep" for name in set(sys.modules) - before)
        import torch.distributed as dist
        try:
            dist.init_process_group("lockstep", store=dist.HashStore(), rank=0, world_size=1)
        except ImportError as error:
            print("named:", error)
        """
    )
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
    )
    assert "named: broken" in done.stdout, done.stderr
