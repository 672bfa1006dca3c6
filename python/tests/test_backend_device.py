"""The part of the backend "lockstep" for GPUs, on the CPU: another backend of torch takes the place of NCCL, and
tensors on the CPU that of tensors on a GPU."""

import contextlib
import datetime
import os
import pathlib
import subprocess
import sys

import _lockstep_backend
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

import lockstep
from lockstep import _backend

_lockstep_backend.register()


def gloo(options, backend_options, ranks):
    """In the place of NCCL."""
    return "cpu", dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)


def blocking(options, backend_options, ranks):
    """As NCCL while it connects the ranks: a call blocks until all ranks have made it."""
    _, inner = gloo(options, backend_options, ranks)
    return "cpu", dist.distributed_c10d._ProcessGroupWrapper(inner, inner)


@contextlib.contextmanager
def process_group(device_backend=gloo, **options):
    """A default group whose tensors on the CPU are Gloo's, compared and watched."""
    before, _backend._device_backend = _backend._device_backend, device_backend
    try:
        dist.init_process_group("lockstep", **options)
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.device_backend().name() == "gloo" or device_backend == blocking
        yield dist.get_rank(), dist.get_world_size()
    finally:
        _backend._device_backend = before
        dist.destroy_process_group()


@on_ranks(1, 2, 3)
def test_operations(world):
    with process_group() as (rank, size):
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        assert tensor.eq(size - 1).all()
        dist.broadcast(tensor.fill_(rank), size - 1)
        assert tensor.eq(size - 1).all()
        parts = [torch.empty(2, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(parts, torch.full((2,), rank))
        assert torch.stack(parts)[:, 0].tolist() == list(range(size))
        whole = torch.empty(size)
        dist.all_gather_into_tensor(whole, torch.tensor([float(rank)]))
        assert whole.tolist() == list(range(size))
        dist.reduce(tensor.fill_(1), 0)
        if rank == 0:
            assert tensor.eq(size).all()
        dist.gather(
            whole := torch.full((2,), float(rank)),
            parts := [torch.empty(2) for _ in range(size)] if rank == 0 else None,
        )
        if rank == 0:
            assert torch.stack(parts)[:, 1].tolist() == list(range(size))
        dist.scatter(whole, [torch.full((2,), float(one)) for one in range(size)] if rank == 0 else None)
        assert whole.eq(rank).all()
        swapped = torch.empty(size, dtype=torch.int64)
        dist.all_to_all_single(swapped, torch.full((size,), rank))
        assert swapped.tolist() == list(range(size))
        if size > 1:
            work = dist.isend(torch.full((2,), float(rank)), (rank + 1) % size)
            dist.recv(whole, (rank - 1) % size)
            work.wait()
            assert whole.eq((rank - 1) % size).all()
        dist.barrier()
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        assert [one["rank"] for one in objects] == list(range(size))


@on_ranks(2, 3)
def test_training_and_groups(world):
    with process_group() as (rank, size):
        torch.manual_seed(1)
        net, alone = nn.Linear(6, 3), nn.Linear(6, 3)
        alone.load_state_dict(net.state_dict())
        parallel = nn.parallel.DistributedDataParallel(net)
        inputs = torch.randn(3, size, 8, 6)
        for model, input_of in (
            (parallel, lambda step: inputs[step, rank]),
            (alone, lambda step: inputs[step].flatten(0, 1)),
        ):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(len(inputs)):
                optimizer.zero_grad()
                model(input_of(step)).square().mean().backward()
                optimizer.step()
        assert torch.allclose(net.weight, alone.weight, atol=1e-6)
        part = dist.new_group([0, size - 1])
        if rank in (0, size - 1):
            dist.all_reduce(tensor := torch.ones(1), group=part)
            assert tensor.item() == 2
        dist.group.WORLD._get_backend(torch.device("cpu")).device_backend()._set_default_timeout(
            datetime.timedelta(seconds=30)
        )


# As on a GPU, the program does not wait for an operation on the host: its next call reports what became of the last.
# Gloo's threads stay in the operation that was aborted, unlike NCCL's, so the ranks end without waiting for them.
SCRIPT = """\
import os, sys, time
sys.path.insert(0, sys.argv[1])
import test_backend_device as tests, torch, torch.distributed as dist
with tests.process_group(tests.{device}, timeout=tests.datetime.timedelta(seconds={timeout})) as (rank, size):
    dist.all_reduce(torch.ones(3))
    try:
        {calls}
        for _ in range(300):
            time.sleep(0.1)
            dist.all_reduce(torch.ones(3), async_op=True)
    except Exception as error:
        print(f"rank {{rank}}: {{type(error).__name__}}: {{error}}", flush=True)
        os._exit(1)
"""


def run_script(folder, calls, device="gloo", timeout=5, options=()):
    """Returns the output and the FATAL line."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(calls=calls, device=device, timeout=timeout))
    program = [sys.executable, script, pathlib.Path(__file__).parent]
    done = subprocess.run(
        [os.environ["LOCKSTEP_PROGRAM"], "run", "-n", "2", *options, *program],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
    )
    return done.stdout, done.stderr.strip().splitlines()[-1]


def test_different_calls(tmp_path):
    said, fatal = run_script(
        tmp_path,
        "one = torch.ones(3); "
        "dist.all_reduce(one, async_op=True) if rank == 0 else dist.broadcast(one, 0, async_op=True)",
    )
    names = "rank 0 called all_reduce(float32[3]), rank 1 called broadcast(float32[3], root 0)"
    assert f"DesyncError: {names}" in said
    assert fatal.startswith("FATAL cause=DESYNC rank=1 ") and names in fatal


def test_rank_without_a_call(tmp_path):
    """The device would wait for it for ever."""
    said, fatal = run_script(tmp_path, "time.sleep(60) if rank == 1 else dist.all_reduce(torch.ones(3), async_op=True)")
    assert "rank 0: TimeoutError: all_reduce(float32[3]) did not finish in time; absent ranks: 1" in said
    assert fatal.startswith("FATAL cause=RANK_STUCK rank=1 ")


@pytest.mark.parametrize("device", ["gloo", "blocking"])
def test_rank_that_waits_for_the_device(tmp_path, device):
    """It uses its core, as cudaStreamSynchronize() does, and does not work for that."""
    said, fatal = run_script(
        tmp_path,
        "work = None if rank == 1 else dist.all_reduce(torch.ones(3), async_op=True)\n"
        "        if rank == 1: time.sleep(60)\n"
        "        while not work.is_completed(): pass",
        device,
        timeout=240,
        options=("--hang-timeout", "4"),
    )
    assert fatal.startswith("FATAL cause=RANK_STUCK rank=1 "), said + fatal
    assert "rank 0 waits in all_reduce#" in fatal and "script.py:" in fatal


@on_ranks(1)
def test_device_without_nccl(world):
    dist.init_process_group("lockstep")
    try:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.device_backend() is None
        with pytest.raises(lockstep.UsageError, match="is on meta, and the backend lockstep of this process has no"):
            backend.allreduce([torch.ones(2, device="meta")])
    finally:
        dist.destroy_process_group()
