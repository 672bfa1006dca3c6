"""Tensors of a module that are replaced, added, removed or changed after its DistributedDataParallel was made."""

import pytest
import torch
from ranks import on_ranks
from torch import nn
from training import expect_gradients, loss_of, make_net, own_data, reference

import lockstep


def replace(net):
    net.second.weight = nn.Parameter(net.second.weight.detach() * 2)


def remove(net):
    net.second.bias = None


def add(net):
    net.added = nn.Parameter(torch.full((3,), 0.5))
    net.forward = lambda x, **more: type(net).forward(net, x, **more) + net.added


def to_empty(net):
    values = {name: value * 3 for name, value in net.state_dict().items()}
    net.to_empty(device="cpu")
    net.load_state_dict(values)


CHANGES = {
    "parameter second.weight was replaced": replace,
    "parameter second.bias was removed": remove,
    "parameter added was added": add,
    "parameter first.weight was removed": lambda net: nn.utils.parametrizations.weight_norm(net.first),
    "parameter first.weight was changed from torch.float32[8, 6] on cpu to torch.float64": lambda net: net.double(),
    "parameter first.weight was replaced": to_empty,
}


def check_change(world, text, change):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    x, y = own_data(world)
    loss_of(net, x, y).backward()
    change(net)
    kind = net.third.weight.dtype
    for _ in range(3):
        net.zero_grad()
        loss_of(net, x.to(kind), y).backward()

    def whole(other, x, y):
        change(other)
        loss_of(other, x.to(kind), y).backward()

    expect_gradients(net, reference(whole), text)
    del ddp


@on_ranks(1, 2, 3)
def test_changes_that_all_ranks_make_are_taken_over(world):
    for text, change in CHANGES.items():
        check_change(world, text, change)


@on_ranks(2)
def test_module_without_tensors_may_be_added_on_one_rank(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    for step in range(2):
        if world.rank == 0 and step == 1:
            net.added = nn.Identity()
        net.zero_grad()
        loss_of(net, *own_data(world)).backward()
    expect_gradients(net, reference(lambda net, x, y: loss_of(net, x, y).backward()))
    del ddp


@on_ranks(2, 3)
def test_different_changes_are_named(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    net.second.weight = nn.Parameter(torch.full((8, 8), float(world.rank)))
    with pytest.raises(lockstep.UsageError, match="second.weight was replaced .* differently on ranks 0 and 1"):
        loss_of(net, *own_data(world)).backward()
    with torch.no_grad():
        net.second.weight.fill_(1)
    loss_of(net, *own_data(world)).backward()
    del ddp


@on_ranks(2)
def test_changes_that_cannot_be_taken_over_are_named(world):
    x, y = own_data(world)
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    optimizer = lockstep.optim.SGD(ddp, lr=0.1)
    replace(net)
    with pytest.raises(lockstep.UsageError, match="second.weight was replaced .* lockstep.optim.SGD"):
        loss_of(net, x, y).backward()
    del optimizer, ddp
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    with ddp.no_sync():
        loss_of(net, x, y).backward()
    replace(net)
    with pytest.raises(lockstep.UsageError, match="second.weight was replaced .* no_sync"):
        loss_of(net, x, y).backward()
    del ddp


@on_ranks(2, fresh=True)
def test_change_on_one_rank_is_named(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    if world.rank == 1:
        replace(net)
    with pytest.raises(lockstep.DesyncError, match="parameter second.weight was replaced"):
        loss_of(net, *own_data(world)).backward()
    del ddp


class Cached(nn.Module):
    def __init__(self, persistent=False):
        super().__init__()
        self.fc, self.persistent = nn.Linear(4, 4), persistent
        self.register_buffer("positions", torch.arange(2.0), persistent=persistent)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if len(x) > len(self.positions):
            self.register_buffer("positions", torch.arange(float(len(x))), persistent=self.persistent)
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return self.fc(x) * self.positions[: len(x), None].cos() + self.mean


def train_cached(world, net, length_of, num_steps=4):
    for step in range(num_steps):
        net(torch.full((length_of(step), 4), 1.0 + world.rank)).pow(2).mean().backward()


@on_ranks(1, 2, 3)
def test_buffers_that_each_rank_replaces(world):
    for mode in ("broadcast", "mean", "local"):
        net = Cached(persistent=mode == "local")
        ddp = lockstep.DistributedDataParallel(net, world, buffers=mode)
        train_cached(world, net, lambda step: 2 + step * (1 + world.rank))
        assert len(net.positions) == 2 + 3 * (1 + world.rank)
        mine = 1.0 + world.rank if mode == "local" else 1.0 if mode == "broadcast" else (1 + world.size) / 2
        torch.testing.assert_close(net.mean, torch.full((4,), mine * (1 - 0.5**4)))
        everyone = world.all_gather_object(net.fc.weight.grad)
        assert all(torch.equal(one, everyone[0]) for one in everyone)
        del ddp


@on_ranks(2)
def test_buffer_that_all_ranks_replace_by_one_of_another_size(world):
    net = Cached(persistent=True)
    ddp = lockstep.DistributedDataParallel(net, world)
    train_cached(world, net, lambda step: 2 + step)
    assert len(net.positions) == 5
    del ddp


@on_ranks(2, 3, fresh=True)
def test_buffer_of_another_size_on_one_rank_is_named(world):
    net = Cached(persistent=True)
    ddp = lockstep.DistributedDataParallel(net, world)
    with pytest.raises(
        lockstep.DesyncError, match="buffer positions was changed|buffer positions was replaced"
    ) as caught:
        train_cached(world, net, lambda step: 2 + step * (world.rank == 1))
    assert "ignore=['positions']" in caught.value.hint and "rank == 0" not in caught.value.hint
    del ddp


@on_ranks(2)
def test_join_after_a_buffer_was_replaced(world):
    net = Cached()
    ddp = lockstep.DistributedDataParallel(net, world)
    lockstep.join(ddp, lambda: train_cached(world, net, lambda step: 2, 2 + world.rank))
    everyone = world.all_gather_object(net.mean)
    assert torch.equal(everyone[0], everyone[1])
    del ddp
