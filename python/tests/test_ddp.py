"""DistributedDataParallel: what PyTorch's users run into, beside one rank on the whole batch."""

import contextlib
import threading

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training import BATCH, SIZES, Net, data, expect_gradients, gradients, loss_of, make_net, own, own_data, reference

import lockstep


@on_ranks(*SIZES)
def test_gradients_are_means_and_unused_parameters_have_none(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    assert all(not name.startswith("module.") for name in net.state_dict())
    for _ in range(3):
        net.zero_grad()
        loss_of(net, *own_data(world)).backward()
        expect_gradients(net, reference(lambda net, x, y: loss_of(net, x, y).backward()))
    assert net.predict(data()[0]).shape == (BATCH,)
    assert ddp.module is net


@on_ranks(2, 3)
def test_branch_on_one_rank_only(world):
    net = make_net()
    lockstep_ddp = lockstep.DistributedDataParallel(net, world)
    x, y = own_data(world)
    for step in range(3):
        net.zero_grad()
        loss_of(net, x, y, branch=world.rank == 0 or step == 0).backward()
        assert net.second.weight.grad is not None
        everyone = world.all_gather_object(net.second.weight.grad)
        assert all(torch.equal(one, everyone[0]) for one in everyone)
    assert net.unused.weight.grad is None
    del lockstep_ddp


@on_ranks(1, 2, 4)
def test_two_forwards_and_one_backward(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    x, y = own_data(world)
    for _ in range(2):
        net.zero_grad()
        (loss_of(net, x, y) + loss_of(net, 2 * x, y)).backward()

    def whole(net, x, y):
        (loss_of(net, x, y) + loss_of(net, 2 * x, y)).backward()

    expect_gradients(net, reference(whole))
    del ddp


@on_ranks(2, 3)
def test_evaluation_on_one_rank(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    x, y = own_data(world)
    for _ in range(3):
        net.zero_grad()
        loss_of(net, x, y).backward()
        if world.rank == 0:
            with torch.no_grad():
                net(data()[0])
    world.barrier()
    del ddp


@on_ranks(1, 2, 3)
def test_no_sync_accumulates(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    x, y = own_data(world)
    with ddp.no_sync():
        loss_of(net, x, y).backward()
    loss_of(net, 2 * x, y).backward()

    def whole(net, x, y):
        loss_of(net, x, y).backward()
        loss_of(net, 2 * x, y).backward()

    expect_gradients(net, reference(whole))


class Checkpointed(Net):
    reentrant = True

    def forward(self, x, branch=True):
        x = torch.tanh(self.first(x))
        x = checkpoint(lambda inner: torch.tanh(self.second(inner)), x, use_reentrant=self.reentrant)
        return self.third(x)


@on_ranks(1, 2, 4)
def test_checkpoint_over_a_part_of_the_model(world):
    x, y = own_data(world)
    for reentrant in (True, False):
        torch.manual_seed(7)
        net = Checkpointed()
        net.reentrant = reentrant
        ddp = lockstep.DistributedDataParallel(net, world)
        for _ in range(3):
            net.zero_grad()
            loss_of(net, x, y).backward()
            expect_gradients(net, reference(lambda net, x, y: loss_of(net, x, y).backward()))
        del ddp


class Fails(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Fails.armed:
            raise ZeroDivisionError("of a backward function")
        return gradient


@on_ranks(1, 2, 3)
def test_exception_in_backward_then_a_good_step(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    x, y = own_data(world)
    loss_of(net, x, y).backward()
    for _ in range(2):
        net.zero_grad()
        Fails.armed = True
        with pytest.raises(ZeroDivisionError, match="of a backward function"):
            Fails.apply(loss_of(net, x, y)).backward()
        Fails.armed = False
        net.zero_grad()
        loss_of(net, x, y).backward()
        expect_gradients(net, reference(lambda net, x, y: loss_of(net, x, y).backward()))
    del ddp


@on_ranks(1, 2)
def test_other_graphs_do_not_count(world):
    net, other = make_net(), nn.Linear(6, 1)
    ddp = lockstep.DistributedDataParallel(net, world)
    x, y = own_data(world)
    for _ in range(3):
        net.zero_grad()
        for _ in range(world.rank):
            other(x).sum().backward()
            torch.autograd.grad(loss_of(net, x, y), net.first.weight)
        loss_of(net, x, y).backward()
        expect_gradients(net, reference(lambda net, x, y: loss_of(net, x, y).backward()))
    del ddp


@on_ranks(1, 2, 3)
def test_create_graph(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    x, y = own_data(world)
    (gradient,) = torch.autograd.grad(loss_of(net, x, y), net.first.weight, create_graph=True)
    (loss_of(net, x, y) + gradient.pow(2).sum()).backward()
    everyone = world.all_gather_object(net.first.weight.grad)
    assert all(torch.equal(one, everyone[0]) for one in everyone)
    del ddp


@on_ranks(2)
def test_two_threads_train_a_model_each(world):
    groups = [world.split(0), world.split(0)]
    nets = [make_net_of(index) for index in range(2)]  # not in the threads: they share the random state
    results, errors = [None, None], []

    def train(index):
        try:
            net = nets[index]
            ddp = lockstep.DistributedDataParallel(net, groups[index])
            for _ in range(10):
                net.zero_grad()
                loss_of(net, *own_data(world)).backward()
            results[index] = gradients(net)
            del ddp
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for index in range(2):
        net = make_net_of(index)
        loss_of(net, *data()).backward()
        for name, gradient in gradients(net).items():
            if gradient is not None:
                torch.testing.assert_close(results[index][name], gradient, rtol=1e-5, atol=1e-6)


def make_net_of(index):
    net = make_net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1 + index)
    return net


@on_ranks(1, 2)
def test_functional_call_and_frozen_parameters(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    x, y = own_data(world)
    functional.cross_entropy(torch.func.functional_call(net, dict(net.named_parameters()), (x,)), y).backward()
    expect_gradients(net, reference(lambda net, x, y: loss_of(net, x, y).backward()))
    net.zero_grad()
    net.first.requires_grad_(False)
    loss_of(net, x, y).backward()
    assert net.first.weight.grad is None
    net.first.requires_grad_(True)
    net.zero_grad()
    loss_of(net, x, y).backward()
    expect_gradients(net, reference(lambda net, x, y: loss_of(net, x, y).backward()))
    del ddp


@on_ranks(2)
def test_models_that_cannot_be_trained_are_refused(world):
    with pytest.raises(lockstep.UsageError, match="expected a torch.nn.Module"):
        lockstep.DistributedDataParallel(torch.ones(2), world)
    with pytest.raises(lockstep.UsageError, match="has no size"):
        lockstep.DistributedDataParallel(nn.LazyLinear(2), world)
    with pytest.raises(lockstep.UsageError, match="requires a gradient"):
        lockstep.DistributedDataParallel(make_net().requires_grad_(False), world)
    with pytest.raises(lockstep.UsageError, match="buffers"):
        lockstep.DistributedDataParallel(make_net(), world, buffers="none")
    with pytest.raises(lockstep.UsageError, match=r"^DistributedDataParallel\(ignore=\): .* not a parameter or buffer"):
        lockstep.DistributedDataParallel(make_net(), world, ignore=["nothing"])


@on_ranks(2, fresh=True)
def test_different_models_are_named(world):
    with pytest.raises(lockstep.CommError) as caught:
        lockstep.DistributedDataParallel(nn.Linear(4, 2 + world.rank), world)
    assert caught.value.cause == "CONFIG_MISMATCH"
    assert "weight" in str(caught.value)


@on_ranks(2, fresh=True)
def test_missing_backward_is_named(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    x, y = own_data(world)
    loss_of(net, x, y).backward()
    with pytest.raises(lockstep.CommError) as caught:
        if world.rank == 0:
            world.barrier()
        else:
            loss_of(net, x, y).backward()
    assert caught.value.cause in ("DESYNC", "RANK_STUCK"), caught.value
    del ddp


@on_ranks(2, 3)
def test_join_with_uneven_batches(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x, y = own_data(world)

    def loop():
        for _ in range(3 + world.rank):
            optimizer.zero_grad()
            loss_of(net, x, y).backward()
            optimizer.step()

    lockstep.join(ddp, loop)
    everyone = world.all_gather_object(net.first.weight.detach())
    assert all(torch.equal(one, everyone[0]) for one in everyone)


@on_ranks(1, 2, 3)
def test_join_with_optimizers_that_have_state(world):
    """Rank r has 1 + r batches, in the first epoch rank 0 none; then all have the state of the last rank."""
    for make in (
        lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
        lambda net: torch.optim.Adam([{"params": net.parameters(), "lr": 0.01}], amsgrad=True),
    ):
        net = make_net()
        ddp = lockstep.DistributedDataParallel(net, world, compare_replicas_every=1)
        optimizer = make(net)
        x, y = own_data(world)

        def loop(num_batches, optimizer=optimizer, net=net, x=x, y=y):
            for _ in range(num_batches):
                optimizer.zero_grad()
                loss_of(net, x, y).backward()
                optimizer.step()

        lockstep.join(ddp, lambda loop=loop: loop(2 * world.rank))
        for _ in range(2):
            lockstep.join(ddp, lambda loop=loop: loop(1 + world.rank))
        loop(10)  # compares the replicas
        everyone = world.all_gather_object([net.state_dict(), optimizer.state_dict()["state"]])
        for one in everyone:
            torch.testing.assert_close(one, everyone[0], rtol=0, atol=0)
        del ddp


def train_with_own_moves(world, net, parts, **options):
    """Sharpness-aware minimization: each rank moves the weights by its own gradient before the one that is averaged."""
    ddp = lockstep.DistributedDataParallel(net, world, **options) if world else None
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(12):
        gradients, before = [], [p.detach().clone() for p in net.parameters()]
        for x, y in parts:
            with ddp.no_sync() if ddp else contextlib.nullcontext():
                loss_of(net, x, y).backward()
            with torch.no_grad():
                for p in net.parameters():
                    p.add_(p.grad if p.grad is not None else 0, alpha=0.1)
            optimizer.zero_grad()
            loss_of(net, x, y).backward()
            gradients.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
            optimizer.zero_grad()
            with torch.no_grad():
                for p, old in zip(net.parameters(), before, strict=True):
                    p.copy_(old)
        for p, *all_parts in zip(net.parameters(), *gradients, strict=True):
            p.grad = None if all_parts[0] is None else sum(all_parts) / len(all_parts)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(1, 2, 3)
def test_weights_that_differ_between_ranks_during_backward(world):
    net, other = make_net(), make_net()
    x, y = data()
    train_with_own_moves(world, net, [(own(world, x), own(world, y))], compare_replicas_every=1)
    train_with_own_moves(None, other, list(zip(x.chunk(world.size), y.chunk(world.size), strict=True)))
    for one, expected in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, expected, rtol=2e-5, atol=2e-6)


@on_ranks(2, 3, fresh=True)
def test_replica_that_diverges_is_named_after_its_step(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x, y = own_data(world)
    with pytest.raises(lockstep.CommError, match="parameter third.bias differs between ranks") as caught:
        for step in range(12):
            loss_of(net, x, y).backward()
            if step == 2 and world.rank == 1:
                net.third.bias.grad.mul_(2)
            optimizer.step()
    assert caught.value.cause == "REPLICA_DIVERGED" and step == 3
    del ddp


@on_ranks(2)
def test_replicas_are_not_compared_with_0(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world, compare_replicas_every=0)
    with torch.no_grad():
        net.third.bias.add_(world.rank)
    for _ in range(10):
        loss_of(net, *own_data(world)).backward()
    with torch.no_grad():
        net.third.bias.sub_(world.rank)
    del ddp


@on_ranks(1, 2)
def test_buffers_are_those_of_rank_0(world):
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    ddp = lockstep.DistributedDataParallel(net, world)
    for step in range(3):
        net(own(world, data(step)[0])).sum().backward()
    everyone = world.all_gather_object(net[1].running_mean)
    assert all(torch.equal(one, everyone[0]) for one in everyone)
    del ddp


@on_ranks(2)
def test_torch_compile_of_the_module(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    compiled = torch.compile(net, backend="aot_eager")
    x, y = own_data(world)
    for _ in range(2):
        net.zero_grad()
        functional.cross_entropy(compiled(x), y).backward()
        expect_gradients(net, reference(lambda net, x, y: loss_of(net, x, y).backward()))
    del ddp


@on_ranks(1, 2)
def test_scripted_modules(world):
    torch.manual_seed(7)
    net = torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    torch.manual_seed(7)
    alone = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    ddp = lockstep.DistributedDataParallel(net, world)
    for _ in range(3):
        net.zero_grad()
        loss_of(net, *own_data(world)).backward()
    loss_of(alone, *data()).backward()
    expect_gradients(net, gradients(alone))
    del ddp


@on_ranks(1)
def test_tensors_of_other_libraries_are_refused(world):
    class DTensor(torch.Tensor):
        pass

    net = nn.Linear(2, 2)
    net.weight = nn.Parameter(torch.zeros(2, 2).as_subclass(DTensor))
    with pytest.raises(lockstep.UsageError, match="weight is a .*DTensor"):
        lockstep.DistributedDataParallel(net, world)
