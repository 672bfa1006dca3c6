"""lockstep.optim beside torch.optim on one rank with the whole batch."""

import copy
import os
import pickle
import sys

import pytest
import torch
from ranks import on_ranks
from torch import nn
from training import data, loss_of, make_net, own, own_data

import lockstep

STEPS = 5
CASES = {
    "SGD": ({"lr": 0.1}, {}),
    "SGD momentum": ({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}, {}),
    "Adam": ({"lr": 0.01, "weight_decay": 0.1}, {}),
    "Adam amsgrad": ({"lr": 0.01, "amsgrad": True}, {}),
    "AdamW": ({"lr": 0.01}, {}),
    "Adagrad": ({"lr": 0.05, "lr_decay": 0.1}, {}),
}


def train(net, optimizer, steps, x, y, before_step=lambda: None):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(net, x, y).backward()
        before_step()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def expect_equal(found, expected):
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6, msg=lambda m, i=index: f"parameter {i}: {m}")


def pair(world, name, **options):
    """Returns a model with our optimizer, one with torch's, and the batches of each."""
    kind = name.split()[0]
    net, other = make_net(), make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    ours = getattr(lockstep.optim, kind)(ddp, **options)
    theirs = getattr(torch.optim, kind)(other.parameters(), **options)
    return (net, ours, [own(world, one) for one in data()]), (other, theirs, list(data()))


@on_ranks(1, 2, 3, 4)
def test_equals_torch(world):
    for name, (options, _) in CASES.items():
        (net, ours, batch), (other, theirs, whole) = pair(world, name, **options)
        expect_equal(train(net, ours, STEPS, *batch), train(other, theirs, STEPS, *whole))


@on_ranks(2, fresh=True)
def test_torch_dynamo_is_not_imported(world):
    net = make_net()
    assert "torch._dynamo" not in sys.modules
    optimizer = lockstep.optim.AdamW(lockstep.DistributedDataParallel(net, world))
    train(net, optimizer, 2, *data())
    optimizer.load_state_dict(optimizer.state_dict())
    assert "torch._dynamo" not in sys.modules


@on_ranks(1, 2)
def test_lamb_and_lars_train(world):
    for kind in (lockstep.optim.LAMB, lockstep.optim.LARS):
        net = make_net()
        optimizer = kind(lockstep.DistributedDataParallel(net, world))
        batch = [own(world, one) for one in data()]
        before = loss_of(net, *batch).item()
        train(net, optimizer, 10, *batch)
        assert loss_of(net, *batch).item() < before


def clip_with(how, net, optimizer, norms):
    if how == "norm":
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.05))
    elif how == "value":
        nn.utils.clip_grad_value_(net.parameters(), 0.01)
    elif how == "own norm":
        norms.append(optimizer.clip_grad_norm(0.05))
    else:
        optimizer.clip_grad_value(0.01)


def check_clipping(world, how):
    (net, ours, batch), (other, theirs, whole) = pair(world, "AdamW", lr=0.01)
    found_norms, expected_norms = [], []
    found = train(net, ours, STEPS, *batch, lambda: clip_with(how, net, ours, found_norms))
    as_torch = how.removeprefix("own ")
    expected = train(other, theirs, STEPS, *whole, lambda: clip_with(as_torch, other, theirs, expected_norms))
    expect_equal(found, expected)
    for one, other_norm in zip(found_norms, expected_norms, strict=True):
        torch.testing.assert_close(one.float(), other_norm.float(), rtol=1e-4, atol=1e-6)


@on_ranks(1, 2, 3)
def test_clipping(world):
    for how in ("norm", "value", "own norm", "own value"):
        check_clipping(world, how)


@on_ranks(1, 2)
def test_schedules_groups_and_changed_options(world):
    net, other = make_net(), make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    groups = [{"params": [net.first.bias, net.second.bias], "weight_decay": 0.0, "lr": 0.05}]
    ours = lockstep.optim.AdamW(ddp, lr=0.01, groups=groups)
    rest = [p for p in other.parameters() if p is not other.first.bias and p is not other.second.bias]
    theirs = torch.optim.AdamW(
        [{"params": rest}, {"params": [other.first.bias, other.second.bias], "weight_decay": 0.0, "lr": 0.05}], lr=0.01
    )
    schedules = [torch.optim.lr_scheduler.OneCycleLR(one, 0.05, total_steps=10) for one in (ours, theirs)]
    batch, whole = [own(world, one) for one in data()], list(data())
    for _ in range(6):
        found = train(net, ours, 1, *batch)
        expected = train(other, theirs, 1, *whole)
        for schedule in schedules:
            schedule.step()
    expect_equal(found, expected)
    ours.param_groups[0]["lr"] = torch.tensor(0.02)
    theirs.param_groups[0]["lr"] = 0.02
    expect_equal(train(net, ours, 2, *batch), train(other, theirs, 2, *whole))
    with pytest.raises(lockstep.UsageError, match="add_param_group"):
        ours.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@on_ranks(1, 2)
def test_state_goes_to_torch_and_back(world):
    for name, (options, _) in CASES.items():
        (net, ours, batch), (other, theirs, whole) = pair(world, name, **options)
        train(net, ours, 3, *batch)
        train(other, theirs, 3, *whole)
        state = ours.state_dict()
        assert pickle.loads(pickle.dumps(state))["param_groups"] == state["param_groups"]
        theirs.load_state_dict(copy.deepcopy(state))
        found = train(net, ours, 2, *batch)
        expect_equal(found, train(other, theirs, 2, *whole))
        ours.load_state_dict(theirs.state_dict())
        expect_equal(train(net, ours, 2, *batch), train(other, theirs, 2, *whole))


@on_ranks(1, 2)
def test_closure(world):
    (net, ours, batch), (other, theirs, whole) = pair(world, "SGD", lr=0.1)

    def closure_of(net, optimizer, x, y):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(net, x, y)
            loss.backward()
            return loss

        return closure

    for _ in range(3):
        loss = ours.step(closure_of(net, ours, *batch))
        theirs.step(closure_of(other, theirs, *whole))
    assert loss.requires_grad
    expect_equal([p.detach() for p in net.parameters()], [p.detach() for p in other.parameters()])


@on_ranks(1, 2, 3)
def test_grad_scaler_skips_on_all_ranks(world):
    net = make_net()
    optimizer = lockstep.optim.SGD(lockstep.DistributedDataParallel(net, world), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    x, y = own_data(world)
    for step in range(4):
        optimizer.zero_grad()
        before = net.first.weight.detach().clone()
        loss = loss_of(net, x, y)
        if step == 2 and world.rank == world.size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step == 1:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, net.first.weight.detach()) == (step == 2), step
    assert world.all_gather_object(scaler.get_scale()) == [512.0] * world.size


@on_ranks(2)
def test_gradients_that_the_user_changes(world):
    (net, ours, batch), (other, theirs, whole) = pair(world, "SGD", lr=0.1)

    def halve(net, optimizer):
        if isinstance(optimizer, lockstep.optim.FusedOptimizer):
            optimizer.average_gradients()
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    found = train(net, ours, 3, *batch, lambda: halve(net, ours))
    expect_equal(found, train(other, theirs, 3, *whole, lambda: halve(other, theirs)))
    optimizer_step_fails = False
    loss_of(net, *batch).backward()
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    try:
        ours.step()
    except lockstep.UsageError:
        optimizer_step_fails = True
    assert optimizer_step_fails


def halve_all(net):
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(0.5)


def clamp_data(net):
    for parameter in net.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def load_other_weights(net):
    torch.manual_seed(11)
    net.load_state_dict(type(net)().state_dict())


def halve_data(net):
    for parameter in net.parameters():
        parameter.data = parameter.data.mul_(0.5)  # in the same memory


@on_ranks(1, 2, 3, 4)
def test_writes_of_all_ranks(world):
    for change in (halve_all, clamp_data, load_other_weights, halve_data):
        (net, ours, batch), (other, theirs, whole) = pair(world, "SGD momentum", lr=0.1, momentum=0.9)
        found = train(net, ours, 2, *batch), change(net), train(net, ours, 2, *batch)
        expected = train(other, theirs, 2, *whole), change(other), train(other, theirs, 2, *whole)
        expect_equal(found[2], expected[2])
        with torch.no_grad():
            loss = loss_of(net, *whole)
        torch.testing.assert_close(loss, loss_of(other, *whole).detach(), rtol=1e-4, atol=1e-6)


@on_ranks(1, 2, 3)
def test_averaged_weights_swapped_in_on_one_rank(world):
    (net, ours, batch), (other, theirs, whole) = pair(world, "AdamW", lr=0.01)
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    expected_average = torch.optim.swa_utils.AveragedModel(
        other, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    for _ in range(4):
        train(net, ours, 1, *batch)
        average.update_parameters(net)
        train(other, theirs, 1, *whole)
        expected_average.update_parameters(other)
        if world.rank == 0:
            saved = [p.detach().clone() for p in net.parameters()]
            for parameter, mean in zip(net.parameters(), average.module.parameters(), strict=True):
                parameter.data.copy_(mean)
            with torch.no_grad():
                loss = loss_of(net, *whole)
                torch.testing.assert_close(loss, loss_of(expected_average, *whole), rtol=1e-4, atol=1e-5)
            for parameter, value in zip(net.parameters(), saved, strict=True):
                parameter.data.copy_(value)
    expect_equal([p.detach() for p in average.parameters()], [p.detach() for p in expected_average.parameters()])
    expect_equal([p.detach() for p in net.parameters()], [p.detach() for p in other.parameters()])


@on_ranks(2)
def test_writes_that_differ_are_named(world):
    (net, ours, batch), _ = pair(world, "SGD", lr=0.1)
    train(net, ours, 1, *batch)
    net.second.weight.data.fill_(world.rank)
    loss_of(net, *batch).backward()
    with pytest.raises(lockstep.UsageError, match=r"second.weight .*change_parameters"):
        ours.step()
    net.second.weight.data.fill_(1)
    ours.step()
    other_memory = torch.ones(8, 8)
    net.second.weight.data = other_memory
    loss_of(net, *batch).backward()
    with pytest.raises(lockstep.UsageError, match=r"memory of parameter second.weight"):
        ours.step()


@on_ranks(2, fresh=True)
def test_write_of_one_rank_is_named(world):
    (net, ours, batch), _ = pair(world, "SGD", lr=0.1)
    if world.rank == 1:
        net.second.weight.data.fill_(1)
    loss_of(net, *batch).backward()
    with pytest.raises(lockstep.DesyncError, match=r"second.weight, changed outside step\(\)"):
        ours.step()


@on_ranks(2)
def test_change_parameters(world):
    (net, ours, batch), _ = pair(world, "SGD", lr=0.1)
    assert ours.shares_parameters
    train(net, ours, 1, *batch)
    before = net.first.weight.detach().clone()
    ours.change_parameters(lambda: net.first.weight.data.mul_(2))
    assert torch.equal(net.first.weight.detach(), 2 * before)
    train(net, ours, 1, *batch)


@on_ranks(1, 2, 3)
def test_average_in_backward(world):
    net, other = make_net(), make_net()
    ours = lockstep.optim.SGD(lockstep.DistributedDataParallel(net, world), lr=0.1, average_in_backward=True)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    batch, whole = [own(world, one) for one in data()], list(data())

    def look(net):
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.grad.norm())

    found = train(net, ours, 3, *batch, lambda: look(net))
    expect_equal(found, train(other, theirs, 3, *whole, lambda: look(other)))
    probe = nn.Linear(2, 1)
    for _ in range(world.rank):
        probe(torch.ones(2)).sum().backward()  # of another model, on some ranks
    expect_equal(train(net, ours, 1, *batch), train(other, theirs, 1, *whole))


@on_ranks(2)
def test_children_have_their_own_parameters(world):
    (net, ours, batch), _ = pair(world, "SGD", lr=0.1)
    train(net, ours, 1, *batch)
    before = net.first.weight.detach().clone()
    child = os.fork()
    if child == 0:
        good = torch.equal(net.first.weight.detach(), before)
        net.first.weight.data.zero_()
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(net.first.weight.detach(), before)
    train(net, ours, 1, *batch)
    world.barrier()


@on_ranks(1, 2)
def test_other_arguments(world):
    with pytest.raises(lockstep.UsageError, match="DistributedDataParallel"):
        lockstep.optim.AdamW(make_net().parameters(), lr=0.1)
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    with pytest.raises(lockstep.UsageError, match="lr"):
        lockstep.optim.SGD(ddp, lr=-1.0)
    copied = copy.deepcopy(net)
    assert torch.equal(copied.first.weight, net.first.weight)
    assert torch.equal(pickle.loads(pickle.dumps(net)).first.weight, net.first.weight)
