"""The backend "lockstep" of torch.distributed when a call fails: order, tags, limits, futures and aborts."""

import datetime
import threading
import time

import _lockstep_backend
import pytest
import torch
import torch.distributed as dist
from process_group import process_group
from ranks import on_ranks

import lockstep

_lockstep_backend.register()


@on_ranks(2, 3)
def test_calls_run_in_their_order(world):
    """Also a blocking call after one that was started."""
    with process_group() as (rank, size):
        for _ in range(20):
            tensor = torch.full((200_000,), rank + 1.0)
            work = dist.broadcast(tensor, 0, async_op=True)
            dist.all_reduce(tensor)
            work.wait()
            assert tensor[0] == tensor[-1] == size


@on_ranks(2, fresh=True)
def test_tags_are_told_apart(world):
    with pytest.raises(lockstep.DesyncError, match="tag"), process_group() as (rank, _):
        dist.send(torch.ones(3), 1, tag=1) if rank == 0 else dist.recv(torch.ones(3), 0, tag=2)


@on_ranks(2, fresh=True)
def test_timeout_of_the_group_ends_a_wait(world):
    world.barrier()  # the timeout is also that of the store in which the ranks wait for each other
    with process_group(timeout=datetime.timedelta(seconds=3)) as (rank, _):
        begin = time.monotonic()
        if rank == 0:
            with pytest.raises(lockstep.TimeoutError):
                dist.all_reduce(torch.ones(3))
            assert 2 < time.monotonic() - begin < 30
        else:
            time.sleep(5)


@on_ranks(2, fresh=True)
def test_future_of_a_failed_operation_has_its_error(world):
    with pytest.raises(lockstep.DesyncError), process_group() as (rank, _):
        tensor = torch.ones(3)
        call = dist.all_reduce if rank == 0 else dist.broadcast
        work = call(tensor, async_op=True) if rank == 0 else call(tensor, 0, async_op=True)
        with pytest.raises(Exception, match="all_reduce.*broadcast"):
            work.get_future().wait()
        work.wait()


@on_ranks(2, fresh=True)
def test_abort_ends_a_wait(world):
    with process_group() as (rank, _):
        if rank == 1:
            time.sleep(3)
            return
        errors = []

        def wait():
            try:
                dist.all_reduce(torch.ones(3))
            except lockstep.CommError as error:
                errors.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        while backend._get_sequence_number_for_group() == 0:
            time.sleep(0.01)
        dist.distributed_c10d._abort_process_group()
        thread.join(20)
        assert not thread.is_alive()
        assert "aborted" in errors[0]


@on_ranks(2, fresh=True)
def test_sizes_that_do_not_fit(world):
    with pytest.raises(lockstep.DesyncError, match="rank 1 sends 3 elements, rank 0 expects 2"), process_group():
        rank = world.rank
        outputs = [torch.empty(2), torch.empty(2)] if rank == 0 else [torch.empty(2), torch.empty(3)]
        dist.all_to_all(outputs, [torch.ones(2), torch.ones(2)] if rank == 0 else [torch.ones(3), torch.ones(3)])
