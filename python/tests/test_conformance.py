"""What PyTorch's own tests of DistributedDataParallel require, by the numbers of docs/internals/conformance.md. The
others are in test_ddp.py: C1, C2, C7, C9, C11, C13, C16, C18, C30."""

import time

import pytest
import torch
from ranks import on_ranks
from test_ddp import Fails, data, expect_gradients, gradients, loss_of, make_net, own_data, reference
from torch import nn

import lockstep


def equal_on_all_ranks(world, tensor):
    everyone = world.all_gather_object(tensor.detach())
    return all(torch.equal(one, everyone[0]) for one in everyone)


class OneWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))


@on_ranks(1, 2, 3, 4)
def test_c3_uneven_inputs_divide_by_all_or_by_active_ranks(world):
    for by_all in (True, False):
        net = OneWeight()
        ddp = lockstep.DistributedDataParallel(net, world)
        found = []

        def loop(net=net, found=found):
            for _ in range(1 if world.rank == 0 else 3):
                net.zero_grad()
                (net.w * 50).sum().backward()
                found.append(net.w.grad.item())

        lockstep.join(ddp, loop, divide_by_initial_world_size=by_all)
        later = 50 * (world.size - 1) / world.size if by_all else 50
        assert found == pytest.approx([50] if world.rank == 0 else [50, later, later])
        del ddp


@on_ranks(2, 3)
def test_c4_join_equals_a_local_run_of_the_summed_steps(world):
    net, alone = make_net(), make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)

    def loop():
        for step in range(2 * (world.rank + 1)):
            optimizer.zero_grad()
            loss_of(net, *data(10 * world.rank + step)).backward()
            optimizer.step()

    lockstep.join(ddp, loop)
    single = torch.optim.SGD(alone.parameters(), 0.05)
    for step in range(2 * world.size):
        single.zero_grad()
        for rank in range(world.size):
            if step < 2 * (rank + 1):
                (loss_of(alone, *data(10 * rank + step)) / world.size).backward()
        single.step()
    for one, other in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@on_ranks(2, 3, fresh=True)
def test_c5_fewer_batches_on_a_rank_are_an_error(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    with pytest.raises(lockstep.CommError) as caught:
        for step in range(3 - (world.rank == 0)):
            net.zero_grad()
            loss_of(net, *data(step)).backward()
        world.barrier(name="end of the epoch")
    assert caught.value.cause == "DESYNC" and "end of the epoch" in str(caught.value)
    del ddp


@on_ranks(2, fresh=True)
def test_c6_exception_in_a_joined_loop_is_unchanged(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)

    def loop():
        for step in range(3):
            if world.rank == 1 and step == 1:
                raise LookupError("no more data")
            net.zero_grad()
            loss_of(net, *data(step)).backward()

    if world.rank == 1:
        with pytest.raises(LookupError, match="no more data"):
            lockstep.join(ddp, loop)
    else:
        with pytest.raises(lockstep.CommError, match="no more data"):
            lockstep.join(ddp, loop)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x, head):
        return self.heads[head](torch.tanh(self.trunk(x)))


def make_heads():
    torch.manual_seed(7)
    return Heads()


@on_ranks(1, 2, 3, 4)
def test_c8_c14_another_graph_in_each_step_and_on_each_rank(world):
    for choose in (lambda rank, step: step % 3, lambda rank, step: (rank + step) % 3):
        net, alone = make_heads(), make_heads()
        ddp = lockstep.DistributedDataParallel(net, world)
        for step in range(6):
            net.zero_grad()
            alone.zero_grad()
            loss_of(net, *data(step + world.rank), head=choose(world.rank, step)).backward()
            for rank in range(world.size):
                (loss_of(alone, *data(step + rank), head=choose(rank, step)) / world.size).backward()
            expect_gradients(net, gradients(alone), f"step {step}")
        del ddp


@on_ranks(2, fresh=True)
def test_c10_other_numbers_of_parameters(world):
    net = nn.Sequential(nn.Linear(2, 2), *[nn.Linear(2, 2)] * world.rank)
    with pytest.raises(lockstep.CommError, match="1.weight|parameter"):
        lockstep.DistributedDataParallel(net, world)


@on_ranks(1, 2, 3)
def test_c15_tied_parameters(world):
    def make():
        net = make_net()
        net.second.weight = nn.Parameter(net.second.weight.detach().clone())
        net.tied = nn.Linear(8, 8)
        net.tied.weight = net.second.weight
        net.forward = lambda x: type(net).forward(net, x) + net.third(net.tied(torch.tanh(net.first(x))))
        return net

    net, alone = make(), make()
    ddp = lockstep.DistributedDataParallel(net, world)
    for _ in range(2):
        net.zero_grad()
        loss_of(net, *own_data(world)).backward()
    loss_of(alone, *data()).backward()
    expect_gradients(net, gradients(alone))
    assert "second.weight" in ddp.stats()["order"] or world.size == 1
    assert "tied.weight" not in ddp.stats()["order"]


@on_ranks(2, 4)
def test_c17_broadcast_parameters_from_another_rank(world):
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.fill_(world.rank)
    lockstep.broadcast_parameters(net, world, root=1)
    assert all(tensor.eq(1).all() for tensor in net.state_dict().values())


@on_ranks(2)
def test_c19_ignored_parameters(world):
    net = make_net()
    with torch.no_grad():
        net.second.weight.add_(world.rank)
    ddp = lockstep.DistributedDataParallel(net, world, ignore=["second.weight"])
    assert not equal_on_all_ranks(world, net.second.weight)
    assert equal_on_all_ranks(world, net.second.bias)
    loss_of(net, *own_data(world)).backward()
    assert not equal_on_all_ranks(world, net.second.weight.grad)
    assert equal_on_all_ranks(world, net.first.weight.grad)
    del ddp


@on_ranks(3, fresh=True)
def test_c20_c29_a_barrier_names_the_missing_rank(world):
    if world.rank == 1:
        time.sleep(2)
        return
    begin = time.monotonic()
    with pytest.raises(lockstep.TimeoutError) as caught:
        world.barrier(timeout=0.5)
    assert 0.4 < time.monotonic() - begin < 1.9
    assert "absent ranks: 1" in str(caught.value) and caught.value.peer == 1


@on_ranks(1, 2, 3)
def test_c21_mixed_dtypes(world):
    net = make_net()
    net.extra = nn.Linear(3, 1).double()
    net.low = nn.Linear(3, 1).bfloat16()
    ddp = lockstep.DistributedDataParallel(net, world)
    x, y = own_data(world)
    out = net(x)
    (nn.functional.cross_entropy(out, y) + net.extra(out.double()).sum() + net.low(out.bfloat16()).sum()).backward()
    for parameter in (net.first.weight, net.extra.weight, net.low.weight):
        assert parameter.grad.dtype == parameter.dtype
        assert equal_on_all_ranks(world, parameter.grad)
    del ddp


@on_ranks(2, 3)
def test_c22_broadcasts_of_mixed_tensors_from_every_root(world):
    for root in range(world.size):
        tensors = [
            torch.full((7 * i + 1,), float(world.rank), dtype=kind)
            for i in range(5)
            for kind in (torch.float16, torch.int64)
        ]
        works = [world.broadcast_async(tensor, root) for tensor in tensors]
        for work in works:
            work.wait()
        assert all(tensor.eq(root).all() for tensor in tensors)


@on_ranks(1, 2, 3)
def test_c23_sparse_gradients_of_embeddings(world):
    net = nn.Embedding(10, 3, sparse=True)
    ddp = lockstep.DistributedDataParallel(net, world)
    words = torch.tensor([[1, 2, 3], [3, 4, 9]])
    net(words + (world.rank % 2) * 0).pow(2).sum().backward()
    assert net.weight.grad.is_sparse
    expected = nn.Embedding(10, 3, sparse=False)
    expected.load_state_dict(net.state_dict())
    expected(words).pow(2).sum().backward()
    torch.testing.assert_close(net.weight.grad.to_dense(), expected.weight.grad)
    del ddp


@on_ranks(2)
def test_c24_c25_stats(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world, compare_replicas_every=0)
    counts = []
    for _ in range(30):
        net.zero_grad()
        loss_of(net, *data()).backward()
        counts.append(ddp.stats()["operations"])
    stats = ddp.stats()
    assert stats["reductions"] == 30
    assert stats["in_place"] and stats["copies_in"] == 0 and stats["copies_out"] == 0
    assert counts[-1] - counts[-2] == 2, counts  # a header and one synchronization
    assert sorted(stats["order"]) == sorted(name for name, p in net.named_parameters() if p.grad is not None)


@on_ranks(1, 2, 3)
def test_c27_sync_batch_norm_equals_one_rank(world):
    def make():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))

    net, alone = make(), make()
    assert lockstep.nn.convert_sync_batch_norm(net, world) is net
    assert list(net.state_dict()) == list(alone.state_dict())
    ddp = lockstep.DistributedDataParallel(net, world, buffers="local")
    for step in range(3):
        net.zero_grad()
        alone.zero_grad()
        loss_of(net, *own_data(world, step)).backward()
        loss_of(alone, *data(step)).backward()
        expect_gradients(net, gradients(alone), f"step {step}")
    torch.testing.assert_close(net[1].running_mean, alone[1].running_mean)
    torch.testing.assert_close(net[1].running_var, alone[1].running_var)
    net.eval(), alone.eval()
    torch.testing.assert_close(net(data()[0]), alone(data()[0]))
    with pytest.raises(lockstep.UsageError, match="no BatchNorm"):
        lockstep.nn.convert_sync_batch_norm(nn.Linear(2, 2), world)
    del ddp


@on_ranks(1, 2, 3)
def test_c28_bf16_compression_is_close(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world, bf16_compress=True)
    for _ in range(2):
        net.zero_grad()
        loss_of(net, *own_data(world)).backward()
    expected = reference(lambda net, x, y: loss_of(net, x, y).backward())
    for name, gradient in gradients(net).items():
        if expected[name] is not None:
            torch.testing.assert_close(gradient, expected[name], rtol=2e-2, atol=1e-3)
    assert equal_on_all_ranks(world, net.first.weight.grad)
    del ddp


@on_ranks(1, 2)
def test_c31_hooks_of_the_user_see_local_gradients(world):
    net, alone = make_net(), make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    seen, expected = [], []
    net.first.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    net.first.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].clone()))
    alone.first.weight.register_hook(lambda gradient: expected.append(gradient.clone()))
    alone.first.register_full_backward_hook(lambda module, inputs, outputs: expected.append(outputs[0].clone()))
    x, y = own_data(world)
    loss_of(net, x, y).backward()
    loss_of(alone, x, y).backward()
    assert len(seen) == len(expected) == 2
    for one, other in zip(seen, expected, strict=True):
        torch.testing.assert_close(one, other)
    del ddp


@on_ranks(1, 2)
def test_c32_a_second_one_after_a_failed_backward(world):
    net = make_net()
    x, y = own_data(world)
    ddp = lockstep.DistributedDataParallel(net, world)
    Fails.armed = True
    with pytest.raises(ZeroDivisionError):
        loss_of(net, Fails.apply(x.requires_grad_()), y).backward()
    Fails.armed = False
    del ddp
    net.zero_grad()
    ddp = lockstep.DistributedDataParallel(net, world)
    loss_of(net, x.detach(), y).backward()
    expect_gradients(net, reference(lambda net, x, y: loss_of(net, x, y).backward()))
    del ddp


@on_ranks(2, 3, fresh=True)
def test_c33_a_loss_that_reaches_nothing_on_one_rank(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    x, y = data()
    loss = loss_of(net, x, y) if world.rank else torch.ones(1, requires_grad=True).sum()
    begin = time.monotonic()
    with pytest.raises(lockstep.CommError) as caught:
        loss.backward()
        world.barrier(name="after backward")
    assert caught.value.cause == "DESYNC" and "after backward" in str(caught.value)
    assert time.monotonic() - begin < 20
    del ddp


@on_ranks(2)
def test_c34_gradients_that_no_rank_has_are_not_sent(world):
    net = make_heads()
    ddp = lockstep.DistributedDataParallel(net, world)
    for step in range(3):
        net.zero_grad()
        loss_of(net, *data(), head=step).backward()
    for _ in range(8):
        net.zero_grad()
        loss_of(net, *data(), head=0).backward()
    assert sorted(ddp.stats()["order"]) == ["heads.0.bias", "heads.0.weight", "trunk.bias", "trunk.weight"]


@on_ranks(2, fresh=True)
def test_c35_other_number_of_dimensions(world):
    net = nn.Module()
    net.w = nn.Parameter(torch.ones(4) if world.rank else torch.ones(2, 2))
    with pytest.raises(lockstep.CommError, match="w"):
        lockstep.DistributedDataParallel(net, world)


@on_ranks(2, fresh=True)
def test_c35_a_collective_on_one_rank_only(world):
    net = make_net()
    ddp = lockstep.DistributedDataParallel(net, world)
    with pytest.raises(lockstep.DesyncError) as caught:
        if world.rank == 0:
            world.all_reduce(torch.ones(3), name="metric")
        loss_of(net, *data()).backward()
    assert "metric" in str(caught.value)
    del ddp
