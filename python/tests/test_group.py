"""Groups of ranks and their operations, on tensors and on Python objects."""

import os
import signal
import threading
import time

import pytest
import torch
from ranks import on_ranks

import lockstep

SIZES = (1, 2, 3, 4)
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
]


@on_ranks(*SIZES)
def test_reductions(world):
    total = world.size * (world.size + 1) // 2
    for dtype in DTYPES:
        for op, expected in (("sum", total), ("max", world.size), ("min", 1)):
            tensor = torch.full((3, 5), world.rank + 1, dtype=dtype)
            world.all_reduce(tensor, op)
            assert tensor.eq(expected).all(), (dtype, op, tensor)
    tensor = torch.full((4,), float(world.rank))
    work = world.all_reduce_async(tensor, "mean")
    work.wait()
    assert work.done()
    assert tensor.eq((world.size - 1) / 2).all()
    transposed = torch.arange(6.0).view(2, 3).t()
    world.all_reduce(transposed)
    assert torch.equal(transposed, world.size * torch.arange(6.0).view(2, 3).t())


@on_ranks(*SIZES)
def test_other_collectives(world):
    root = world.size - 1
    tensor = torch.full((2,), float(world.rank))
    world.broadcast(tensor, root)
    assert tensor.eq(root).all()
    world.reduce(tensor, 0)
    if world.rank == 0:
        assert tensor.eq(root * world.size).all()
    gathered = torch.empty(2 * world.size)
    world.all_gather(gathered, torch.full((2,), float(world.rank)))
    assert gathered.tolist() == [float(rank) for rank in range(world.size) for _ in range(2)]
    unequal = world.all_gather_unequal(torch.full((world.rank + 1,), world.rank))
    assert [one.tolist() for one in unequal] == [[rank] * (rank + 1) for rank in range(world.size)]
    part = torch.empty(2)
    world.reduce_scatter(part, torch.arange(2.0 * world.size))
    assert part.tolist() == [world.size * 2.0 * world.rank, world.size * (2.0 * world.rank + 1)]
    output = torch.empty(world.size) if world.rank == root else None
    world.gather(output, torch.tensor([float(world.rank)]), root)
    if world.rank == root:
        assert output.tolist() == list(map(float, range(world.size)))
    own = torch.empty(1)
    world.scatter(own, torch.arange(float(world.size)) if world.rank == 0 else None, 0)
    assert own.item() == world.rank
    exchanged = torch.empty(world.size)
    world.all_to_all(exchanged, torch.full((world.size,), float(world.rank)))
    assert exchanged.tolist() == list(map(float, range(world.size)))
    world.barrier(name="the end")


@on_ranks(2, 3)
def test_messages_between_two_ranks(world):
    following, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    received = torch.empty(3)
    work = world.recv_async(received, before)
    world.send(torch.full((3,), float(world.rank)), following)
    work.wait(timeout=30)
    assert received.eq(before).all()


@on_ranks(2, 3)
def test_messages_from_any_rank(world):
    if world.rank > 0:
        world.send(torch.full((3,), float(world.rank)), 0)
        return
    received = torch.empty(3)
    sources = []
    for _ in range(1, world.size):
        sources.append(world.recv_any(received))
        assert received.eq(sources[-1]).all()
    assert sorted(sources) == list(range(1, world.size))


@on_ranks(1, 2, 3)
def test_objects(world):
    value = {"rank": world.rank, "tensor": torch.tensor([world.rank]), "list": [1.5, "text", None, (True,)]}
    everyone = world.all_gather_object(value)
    assert [one["rank"] for one in everyone] == list(range(world.size))
    assert everyone[-1]["tensor"].item() == world.size - 1
    assert everyone[0]["list"] == [1.5, "text", None, (True,)]
    assert world.broadcast_object(value if world.rank == 0 else None, 0)["rank"] == 0
    with pytest.raises(lockstep.UsageError, match="cannot be received safely"):
        world.all_gather_object(pytest.raises)


@on_ranks(2, 4)
def test_split(world):
    half = world.split(world.rank % 2, key=-world.rank)
    assert half.size == world.size // 2
    tensor = torch.tensor([float(world.rank)])
    half.all_reduce(tensor)
    assert tensor.item() == sum(range(world.rank % 2, world.size, 2))
    assert half.global_rank(half.rank) == world.rank
    assert world.split_by_host().size == world.size


@on_ranks(1, 2)
def test_facts(world):
    assert world.name == "world"
    assert world.transport == ("self" if world.size == 1 else "shm")
    assert (world.local_rank, world.local_size, world.node_rank, world.num_nodes) == (world.rank, world.size, 0, 1)
    assert world.device == torch.device("cpu")
    assert f"rank {world.rank} of {world.size}" in repr(world)
    assert not world.stop_requested()
    busy = world.busy("evaluate")
    for _ in range(2):
        with busy as same, busy:
            assert same is busy
            world.alive()
    steps = world.steps
    world.step()
    assert world.steps == steps + 1


@on_ranks(1, 3)
def test_comm_seconds(world):
    own_work = 0.0 if world.rank == 0 else 0.3
    world.barrier()  # all ranks have begun
    before = world.comm_seconds
    operations = [
        world.barrier,
        lambda: world.all_reduce(torch.ones(4)),
        lambda: world.all_reduce_async(torch.ones(4)).wait(),
        lambda: (
            world.recv(torch.ones(4), 1)
            if world.rank == 0
            else world.send(torch.ones(4), 0)
            if world.rank == 1
            else None
        ),
    ]
    for operation in operations if world.size > 1 else operations[:-1]:
        time.sleep(own_work)
        operation()
    waited = world.all_gather_object(world.comm_seconds - before)
    if world.size == 1:
        assert waited[0] < 0.1
    else:
        assert waited[0] > 0.5 and waited[0] > 2 * max(waited[1:]), waited


@on_ranks(2)
def test_invalid_arguments(world):
    with pytest.raises(lockstep.UsageError, match='op is "average"|expected one of'):
        world.all_reduce(torch.ones(1), "average")
    with pytest.raises(ValueError) as caught:
        world.broadcast(torch.ones(1), 7)
    assert caught.value.cause == "BAD_ARG"
    with pytest.raises(lockstep.UsageError):
        world.all_reduce(torch.ones(1, dtype=torch.complex64))
    world.barrier()


@on_ranks(2, fresh=True)
def test_desync_names_both_calls(world):
    with pytest.raises(lockstep.DesyncError) as caught:
        world.all_reduce(torch.ones(2 + world.rank), name="loss")
    assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value) and "loss" in str(caught.value)
    assert caught.value.cause == "DESYNC"
    assert isinstance(caught.value, lockstep.CommError)
    with pytest.raises(lockstep.DesyncError):
        world.barrier()


@on_ranks(2, fresh=True)
def test_timeout(world):
    if world.rank == 1:
        time.sleep(2)
        return
    begin = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        world.all_reduce(torch.ones(1), timeout=0.5)
    assert time.monotonic() - begin < 1.9
    assert isinstance(caught.value, lockstep.TimeoutError)


def expect_interrupt(world, wait):
    if world.rank == 1:
        time.sleep(3)
        return
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert time.monotonic() - begin < 2
    timer.join()


@on_ranks(2, fresh=True)
def test_interrupt_ends_a_wait(world):
    expect_interrupt(world, world.barrier)


@on_ranks(2, fresh=True)
def test_interrupt_ends_a_wait_for_an_asynchronous_operation(world):
    work = world.all_reduce_async(torch.ones(1)) if world.rank == 0 else None
    expect_interrupt(world, lambda: work.wait())


@on_ranks(2)
def test_other_threads_run_during_waits(world):
    net = torch.nn.Linear(2, 1)
    ddp = lockstep.DistributedDataParallel(net, world)
    optimizer = lockstep.optim.SGD(ddp, 0.1)
    plain = lockstep.DistributedDataParallel(torch.nn.Linear(2, 1), world)
    net(torch.ones(1, 2)).sum().backward()
    waits = {
        "barrier": world.barrier,
        "object": lambda: world.all_gather_object(1),
        "work": lambda: world.all_reduce_async(torch.ones(1)).wait(),
        "split": lambda: world.split(0),
        "step": optimizer.step,
        "compare": plain.compare_replicas,
        "construction": lambda: lockstep.DistributedDataParallel(torch.nn.Linear(2, 1), world),
    }
    for name, wait in waits.items():
        if world.rank == 1:
            time.sleep(0.4)
            wait()
            continue
        counted, stop = [], threading.Event()

        def count(counted=counted, stop=stop):
            while not stop.is_set():
                counted.append(1)
                time.sleep(0.01)

        thread = threading.Thread(target=count)
        thread.start()
        wait()
        stop.set()
        thread.join()
        assert len(counted) > 8, name
