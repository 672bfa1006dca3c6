"""lockstep.data: each sample once, positions with workers, resuming with another number of ranks, ranks out of step."""

import math
import random

import pytest
import torch
from ranks import on_ranks

import lockstep
from lockstep.data import DataLoader, Sampler


class Numbers(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count, self.epoch = count, -1

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor([index])

    def set_epoch(self, epoch):
        self.epoch = epoch


def numbers_of(world, batches):
    """The samples of all ranks, in the order of ranks."""
    own = [number for batch in batches for number in batch.flatten().tolist()]
    return [number for one in world.all_gather_object(own) for number in one]


@on_ranks(1, 2, 3)
def test_each_sample_once(world):
    for workers in (0, 2):
        for mode, count in (("exact", 23), ("drop", 23 // world.size * world.size)):
            loader = DataLoader(Numbers(23), world, batch_size=3, seed=5, mode=mode, num_workers=workers)
            seen = numbers_of(world, loader.epoch(0))
            assert len(seen) == len(set(seen)) == count and loader.samples_drawn == 23
            assert numbers_of(world, loader.epoch(1)) != seen
            assert numbers_of(world, DataLoader(Numbers(23), world, batch_size=3, seed=5, mode=mode).epoch(0)) == seen
    padded = DataLoader(Numbers(23), world, batch_size=3, seed=5)
    assert len(padded) == math.ceil(math.ceil(23 / world.size) / 3) and padded.is_exact == (23 % world.size == 0)
    assert set(numbers_of(world, padded)) == set(range(23))
    assert padded._dataset.epoch == 0 and padded.current_epoch == 0
    in_order = DataLoader(Numbers(6), world, shuffle=False)
    assert sorted(numbers_of(world, in_order.epoch(3))) == sorted(list(range(6)) + list(range(-6 % world.size)))


@on_ranks(1, 2)
def test_resumes_after_the_batch_that_was_received(world):
    """Workers have drawn further; the position has not."""
    for workers in (0, 2):
        whole = DataLoader(Numbers(40), world, batch_size=2, seed=1, num_workers=workers)
        expected = [batch.flatten().tolist() for batch in whole.epoch(2)]
        first = DataLoader(Numbers(40), world, batch_size=2, seed=1, num_workers=workers)
        got = []
        for batch in first.epoch(2):
            got.append(batch.flatten().tolist())
            if len(got) == 3:
                break
        state = first.state_dict()
        assert state == {"seed": 1, "epoch": 2, "samples_drawn": 6 * world.size, "num_samples": 40, "shuffle": True}
        second = DataLoader(Numbers(40), world, batch_size=2, seed=1, num_workers=workers)
        second.load_state_dict(state)
        assert list(second.remaining_epochs(4)) == [2, 3]
        got += [batch.flatten().tolist() for batch in second.epoch(2)]
        assert got == expected
        assert list(second.remaining_epochs(4)) == [3]
        first.load_state_dict(state)
        got = got[:3] + [batch.flatten().tolist() for batch in first]  # the loader as a range continues, too
        assert got == expected


@on_ranks(3)
def test_resumes_with_another_number_of_ranks(world):
    """What one rank has left of an epoch, three ranks draw once."""
    alone = DataLoader(Numbers(30), None, batch_size=3, seed=2, mode="exact")
    batches = iter(alone.epoch(0))
    drawn = [next(batches).flatten().tolist() for _ in range(4)]
    loader = DataLoader(Numbers(30), world, batch_size=2, seed=2, mode="exact")
    loader.load_state_dict(alone.state_dict())
    rest = numbers_of(world, loader.epoch(0))
    assert sorted(sum(drawn, []) + rest) == list(range(30))


@on_ranks(2)
def test_passes_do_not_mix(world):
    """A pass that has begun keeps its epoch when another one begins."""
    loader = DataLoader(Numbers(12), world, batch_size=2, seed=1)
    expected = [batch.flatten().tolist() for batch in loader.epoch(0)]
    first = loader.epoch(0)
    loader.epoch(1)
    assert [batch.flatten().tolist() for batch in first] == expected


@on_ranks(2)
def test_other_order_is_refused(world):
    state = DataLoader(Numbers(40), world, seed=1).state_dict()
    for other in (Numbers(41), 1), (Numbers(40), 2):
        with pytest.raises(lockstep.UsageError, match="expected the same"):
            DataLoader(other[0], world, seed=other[1]).load_state_dict(state)
    with pytest.raises(lockstep.UsageError, match="mode"):
        DataLoader(Numbers(40), world, mode="random")
    with pytest.raises(lockstep.UsageError, match="seed, shuffle and mode"):
        DataLoader(Numbers(40), world, sampler=[1, 2])
    with pytest.raises(lockstep.UsageError, match="set_epoch"):
        DataLoader(Numbers(40), world, num_workers=1, persistent_workers=True)


@on_ranks(2)
def test_sampler_with_a_loader_of_torch(world):
    sampler = Sampler(Numbers(21), world, seed=4)
    loader = torch.utils.data.DataLoader(Numbers(21), batch_size=4, sampler=sampler, num_workers=1)
    sampler.set_epoch(1)
    own = [number for batch in loader for number in batch.flatten().tolist()]
    assert len(own) == len(sampler) == 11
    same = DataLoader(Numbers(21), world, batch_size=4, seed=4)
    assert [number for batch in same.epoch(1) for number in batch.flatten().tolist()] == own


class Drawn(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([random.random(), torch.rand((), dtype=torch.float64).item()], dtype=torch.float64)


@on_ranks(1, 2, 3)
def test_random_numbers_of_workers_differ_between_ranks_epochs_and_resumes(world):
    def drawn(epochs, state=None, **options):
        loader = DataLoader(Drawn(), world, batch_size=1, seed=3, num_workers=2, **options)
        if state:
            loader.load_state_dict(state)
        return [list(loader.epoch(epoch)) for epoch in epochs]

    for persistent in (False, True):
        epochs = drawn(range(2), persistent_workers=persistent)
        numbers = [number for one in world.all_gather_object(epochs) for batches in one for number in batches]
        assert len(torch.cat(numbers).unique()) == 48
    again = drawn([1])
    assert all(map(torch.equal, again[0], drawn([1])[0])), "a run draws the same again"
    loader = DataLoader(Drawn(), world, batch_size=1, seed=3, num_workers=2)
    batches = loader.epoch(1)
    seen = [next(batches) for _ in range(2)]
    resumed = drawn([1], loader.state_dict())[0]
    assert len(torch.cat(seen + resumed).unique()) == 24 // world.size
    generator = torch.Generator().manual_seed(world.rank)
    assert not torch.equal(torch.cat(drawn([1], generator=generator)[0]), torch.cat(again[0]))


@on_ranks(2, fresh=True)
def test_rank_that_skips_a_batch_is_found(world):
    net = torch.nn.Linear(1, 1)
    ddp = lockstep.DistributedDataParallel(net, world)
    loader = DataLoader(Numbers(40), world, batch_size=2)
    with pytest.raises(lockstep.DesyncError, match="batch"):
        for step, batch in enumerate(loader.epoch(0)):
            if step == 1 and world.rank == 1:
                continue
            net(batch.float()).mean().backward()
    del ddp
