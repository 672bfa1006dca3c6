"""Optimizers of lockstep.optim in programs that were written for torch.optim, beside torch.optim on one rank."""

import copy
import threading

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import data, loss_of, make_net, own, own_data, reference

import lockstep


def expect_equal(net, other):
    for (name, one), two in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")


def loss_in_branches(net, x, y, size):
    """The mean over `size` parts of the batch, of which only odd ones take the long branch."""
    parts = zip(x.chunk(size), y.chunk(size), strict=True)
    return sum(loss_of(net, one, two, branch=rank % 2 == 1) for rank, (one, two) in enumerate(parts)) / size


def clip(how, net):
    if how == "value":
        nn.utils.clip_grad_value_(net.parameters(), 0.01)
        return torch.zeros(())
    if how == "keywords":
        return nn.utils.clip_grad_norm_(max_norm=0.05, parameters=net.parameters())
    return nn.utils.clip_grad_norm_(net.parameters(), 0.05)


@on_ranks(1, 2, 3)
def test_clipping_where_ranks_take_other_branches(world):
    for how in ("norm", "keywords", "value"):
        net, other = make_net(), make_net()
        ours = lockstep.optim.SGD(lockstep.DistributedDataParallel(net, world), lr=0.5)
        theirs = torch.optim.SGD(other.parameters(), lr=0.5)
        for _ in range(3):
            ours.zero_grad()
            theirs.zero_grad()
            loss_of(net, *own_data(world), branch=world.rank % 2 == 1).backward()
            loss_in_branches(other, *data(), world.size).backward()
            norm, expected = clip(how, net), clip(how, other)
            torch.testing.assert_close(norm, expected, rtol=1e-4, atol=1e-6)
            ours.step()
            theirs.step()
        expect_equal(net, other)


@on_ranks(1, 2)
def test_groups_that_list_all_parameters(world):
    net, other = make_net(), make_net()

    def groups_of(net):
        weights = [p for p in net.parameters() if p.dim() > 1]
        return [
            {"params": weights, "weight_decay": 0.1},
            {"params": [p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]

    ours = lockstep.optim.AdamW(lockstep.DistributedDataParallel(net, world), lr=0.01, groups=groups_of(net))
    theirs = torch.optim.AdamW(groups_of(other), lr=0.01)
    assert len(ours.param_groups) == 2
    schedules = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (ours, theirs)]
    for step in range(5):
        if step == 2:
            for one in (ours, theirs):
                one.param_groups[1]["lr"] = 0.05
        for model, optimizer, batch in ((net, ours, [own(world, one) for one in data()]), (other, theirs, data())):
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    expect_equal(net, other)
    ours.load_state_dict(theirs.state_dict())


@on_ranks(1, 2)
def test_state_of_torch_that_has_never_been_ours(world):
    for kind, options in (("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adam", {"lr": 0.01}), ("Adagrad", {"lr": 0.05})):
        net, other = make_net(), make_net()
        theirs = getattr(torch.optim, kind)(other.parameters(), **options)
        loss_of(other, *data()).backward()
        theirs.step()
        net.load_state_dict(other.state_dict())
        ours = getattr(lockstep.optim, kind)(lockstep.DistributedDataParallel(net, world), **options)
        ours.load_state_dict(theirs.state_dict())
        for model, optimizer, batch in ((net, ours, [own(world, one) for one in data()]), (other, theirs, data())):
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(model, *batch).backward()
                optimizer.step()
        expect_equal(net, other)


@on_ranks(1, 2)
def test_gradients_that_are_written_by_hand(world):
    net, other = make_net(), make_net()
    ours = lockstep.optim.SGD(lockstep.DistributedDataParallel(net, world), lr=0.5)
    theirs = torch.optim.SGD(other.parameters(), lr=0.5)
    for _ in range(2):
        for model, optimizer, batch in ((net, ours, [own(world, one) for one in data()]), (other, theirs, data())):
            used = [p for name, p in model.named_parameters() if not name.startswith("unused")]
            for parameter, gradient in zip(used, torch.autograd.grad(loss_of(model, *batch), used), strict=True):
                parameter.grad = gradient
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    expect_equal(net, other)


@on_ranks(2)
def test_optimizer_of_torch_beside_ours_is_named(world):
    net = make_net()
    ours = lockstep.optim.SGD(lockstep.DistributedDataParallel(net, world), lr=0.1)
    theirs = torch.optim.SGD(net.parameters(), lr=0.1)
    loss_of(net, *own_data(world)).backward()
    with pytest.raises(lockstep.UsageError, match="torch.optim.SGD: step.* delete the lockstep.optim.SGD"):
        theirs.step()
    with pytest.raises(lockstep.UsageError, match="get_total_norm"):
        nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
    ours.average_gradients()
    expected = reference(lambda net, x, y: loss_of(net, x, y).backward())
    norm = nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
    torch.testing.assert_close(norm, nn.utils.get_total_norm([one for one in expected.values() if one is not None]))


@on_ranks(1, 2)
def test_a_second_model_and_optimizer_replace_the_first(world):
    net = make_net()
    for _ in range(3):
        ddp = lockstep.DistributedDataParallel(net, world)
        optimizer = lockstep.optim.SGD(ddp, lr=0.1)
        before = net.first.weight.detach().clone()
        loss_of(net, *own_data(world)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(before, net.first.weight)


@on_ranks(2)
def test_mean_after_backward_on_another_thread(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    optimizer = lockstep.optim.SGD(ddp, lr=0.1, average_in_backward=True)
    thread = threading.Thread(target=lambda: loss_of(net, *own_data(world)).backward())
    thread.start()
    thread.join()
    expected = reference(lambda net, x, y: loss_of(net, x, y).backward())
    torch.testing.assert_close(net.first.weight.grad, expected["first.weight"], rtol=1e-5, atol=1e-6)
    del optimizer


@on_ranks(1, 2)
def test_checkpoints_that_share_a_parameter(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    other = make_net()
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)

    def loss(net, x, y, checkpointed):
        hidden = net.first(x.requires_grad_())
        for _ in range(2):
            hidden = checkpoint(net.second, hidden, use_reentrant=True) if checkpointed else net.second(hidden)
        return nn.functional.cross_entropy(net.third(hidden), y)

    for _ in range(3):
        for one in (optimizer, theirs):
            one.zero_grad()
        loss(net, *own_data(world), True).backward()
        loss(other, *data(), False).backward()
        optimizer.step()
        theirs.step()
    expect_equal(net, other)
    del ddp


@on_ranks(1)
def test_what_is_not_supported_is_named(world):
    net = make_net()
    optimizer = lockstep.optim.SGD(lockstep.DistributedDataParallel(net, world), lr=0.1)
    with pytest.raises(lockstep.UsageError, match="copy or save its state_dict"):
        copy.deepcopy(optimizer)
    state = torch.optim.SGD(net.parameters(), lr=0.1, maximize=True).state_dict()
    with pytest.raises(lockstep.UsageError, match="maximize=True; expected False"):
        optimizer.load_state_dict(state)
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(lockstep.UsageError, match="maximize=True; expected False"):
        optimizer.step()
    with pytest.raises(lockstep.UsageError, match="wire_dtype"):
        lockstep.DistributedDataParallel(make_net(), world, wire_dtype="bf16")


@on_ranks(2, 3)
def test_models_in_shared_memory(world):
    """Processes that read them see the updates of torch's optimizers, and of ours where the ranks share no copy."""
    net = make_net().share_memory()
    ddp = lockstep.DistributedDataParallel(net, world)
    with pytest.raises(lockstep.UsageError, match="first.weight is in shared memory .* use torch.optim.SGD"):
        lockstep.optim.SGD(ddp, lr=0.1)
    del ddp
    net = make_net().share_memory()
    memory = net.first.weight.data_ptr()
    ddp = lockstep.DistributedDataParallel(net, world)
    for optimizer in (lockstep.optim.SGD(ddp, lr=0.1, foreach=True), torch.optim.SGD(net.parameters(), lr=0.1)):
        before = net.first.weight.detach().clone()
        loss_of(net, *own_data(world)).backward()
        optimizer.step()
        assert net.first.weight.data_ptr() == memory and not torch.equal(net.first.weight, before)
        if isinstance(optimizer, lockstep.optim.SGD):
            optimizer._close()


@on_ranks(2)
def test_share_memory_after_the_optimizer_was_made_is_named(world):
    net = make_net()
    optimizer = lockstep.optim.SGD(lockstep.DistributedDataParallel(net, world), lr=0.1)
    loss_of(net, *own_data(world)).backward()
    net.share_memory()
    with pytest.raises(lockstep.UsageError, match="first.weight"):
        optimizer.step()


@on_ranks(1, 2)
def test_state_that_a_program_changes(world):
    net = make_net()
    optimizer = lockstep.optim.SGD(lockstep.DistributedDataParallel(net, world), lr=0.1, momentum=0.9)
    for _ in range(2):
        loss_of(net, *own_data(world)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = net.first.weight
    for change in (
        lambda: optimizer.state.clear(),
        lambda: setattr(optimizer, "state", {}),
        lambda: optimizer.state[weight]["momentum_buffer"].zero_(),
        lambda: optimizer.state.setdefault(weight, {}),
        lambda: optimizer.state.update({weight: {}}),
    ):
        with pytest.raises(lockstep.UsageError, match="load_state_dict"):
            change()
    assert not optimizer.state and list(optimizer.state.items()) == []
    saved = optimizer.state_dict()
    assert saved["state"][0]["momentum_buffer"].abs().sum() > 0
    optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
    other = make_net()
    other.load_state_dict(net.state_dict())
    fresh = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    for model, one, batch in ((net, optimizer, [own(world, one) for one in data()]), (other, fresh, data())):
        for _ in range(2):
            one.zero_grad()
            loss_of(model, *batch).backward()
            one.step()
    expect_equal(net, other)


@on_ranks(1, 2)
def test_hooks_of_state_dicts_run(world):
    called = []

    def with_mark(optimizer, state):
        assert state["state"] and state["param_groups"]
        return {**state, "mark": 1}

    for make in (lockstep.optim.SGD, lambda ddp, **options: torch.optim.SGD(ddp.module.parameters(), **options)):
        net = make_net()
        optimizer = make(lockstep.DistributedDataParallel(net, world), lr=0.1, momentum=0.9)
        loss_of(net, *own_data(world)).backward()
        optimizer.step()
        optimizer.register_state_dict_pre_hook(lambda _: called.append("save"))
        optimizer.register_state_dict_post_hook(with_mark)
        optimizer.register_load_state_dict_pre_hook(lambda _, state: {**state, "mark": called.append(state["mark"])})
        optimizer.register_load_state_dict_post_hook(lambda _: called.append("loaded"))
        optimizer.load_state_dict(optimizer.state_dict())
        assert called == ["save", 1, "loaded"], (make, called)
        called.clear()


@on_ranks(2, 3)
def test_optimizer_in_a_gradient_hook_is_named(world):
    for make in (
        lambda ddp, p: torch.optim.SGD([p], lr=0.1),
        lambda ddp, p: lockstep.optim.SGD(ddp, lr=0.1) if p is ddp.module.third.bias else None,
    ):
        net = make_net()
        ddp = lockstep.DistributedDataParallel(net, world)
        optimizers = {p: make(ddp, p) for p in net.parameters()}
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(lambda p, all_of=optimizers: all_of[p] and all_of[p].step())
        before = net.third.bias.detach().clone()
        with pytest.raises(lockstep.UsageError, match="step.. was called inside backward.* update_in_backward"):
            loss_of(net, *own_data(world)).backward()
        assert torch.equal(before, net.third.bias)
        world.barrier()
