"""A step that one rank leaves out is an error; what all ranks leave out, or what concerns one rank only, is none."""

import lockstep.horovod as hvd
import pytest
import torch
import torch.distributed as dist
from process_group import process_group
from ranks import on_ranks
from torch import nn

import lockstep

SIZES = (1, 2, 3)
STEPS = 6


def inputs(world, step):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step * world.size + world.rank))


def train(model, optimizer, world, leave_out=(), do=lambda step, loss: loss.backward(), steps=STEPS):
    """`leave_out`: pairs of a step and a rank, which does not call optimizer.step() there."""
    for step in range(steps):
        optimizer.zero_grad()
        do(step, model(inputs(world, step)).square().mean())
        if (step, world.rank) not in leave_out:
            optimizer.step()


def fused_and_not(world):
    """A model with an optimizer of torch, and one with a fused optimizer."""
    for fused in (False, True):
        net = nn.Linear(3, 1)
        ddp = lockstep.DistributedDataParallel(net, world)
        yield net, ddp, lockstep.optim.SGD(ddp, lr=0.1) if fused else torch.optim.SGD(net.parameters(), lr=0.1)


ONCE = ((2, 1),)
TWICE = ((2, 1), (4, 0))


@on_ranks(2, 3, fresh=True)
def test_torch_optimizer(world):
    net = nn.Linear(3, 1)
    ddp = lockstep.DistributedDataParallel(net, world, compare_replicas_every=0)
    with pytest.raises(lockstep.DesyncError, match="rank 0 has made 3 optimizer steps, rank 1 has made 2"):
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), world, ONCE)
    del ddp


@on_ranks(2, 3, fresh=True)
def test_fused_optimizer(world):
    net = nn.Linear(3, 1)
    ddp = lockstep.DistributedDataParallel(net, world)
    with pytest.raises(lockstep.DesyncError, match=r"rank 0 has called backward\(\) 3 times, rank 1 .* 4 times"):
        train(net, lockstep.optim.SGD(ddp, lr=0.1), world, TWICE)


@on_ranks(2, fresh=True)
def test_second_optimizer(world):
    """Its gradients are cleared with those of the first."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    ddp = lockstep.DistributedDataParallel(net, world, compare_replicas_every=0)
    both = [torch.optim.Adam(part.parameters()) for part in net]
    with pytest.raises(lockstep.DesyncError, match="6 optimizer steps, rank 1 has made 5"):
        for step in range(STEPS):
            net.zero_grad()
            net(inputs(world, step)).square().mean().backward()
            both[0].step()
            if (step, world.rank) != (2, 1):
                both[1].step()
    del ddp


@on_ranks(2, 3, fresh=True)
def test_torch_ddp_over_the_backend(world):
    dist.init_process_group("lockstep")
    net = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    with pytest.raises(RuntimeError, match=r"after 3 optimizer steps.*after 2 optimizer steps"):
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), world, ONCE)


def hvd_optimizer(net, **options):
    if not hvd.is_initialized():
        hvd.init()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters(), **options)


@on_ranks(2, 3, fresh=True)
def test_horovod_scaler(world):
    net = nn.Linear(3, 1)
    with pytest.raises(lockstep.DesyncError, match="1 backward.. calls without step"):
        train(net, hvd_optimizer(net), world, TWICE)


@on_ranks(2, fresh=True)
def test_horovod_model_zero_grad(world):
    net = nn.Linear(3, 1)
    optimizer = hvd_optimizer(net)
    with pytest.raises(lockstep.DesyncError, match="1 backward.. calls without step"):
        for step in range(STEPS):
            net.zero_grad()
            net(inputs(world, step)).square().mean().backward()
            if (step, world.rank) not in TWICE:
                optimizer.step()


@on_ranks(2, fresh=True)
def test_horovod_continue(world):
    net = nn.Linear(3, 1)
    optimizer = hvd_optimizer(net)
    with pytest.raises(lockstep.DesyncError, match="3 zero_grad.*4 zero_grad"):
        for step in range(STEPS):
            optimizer.zero_grad()
            if (step, world.rank) in TWICE:
                continue
            net(inputs(world, step)).square().mean().backward()
            optimizer.step()


def leave_out_on_all(world):
    return tuple((2, rank) for rank in range(world.size))


@on_ranks(*SIZES)
def test_step_that_all_leave_out(world):
    for net, _ddp, optimizer in fused_and_not(world):
        train(net, optimizer, world, leave_out_on_all(world))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            infinite = (step, world.rank) == (2, 0)
            loss = net(inputs(world, step)).square().mean() * (float("inf") if infinite else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        world.barrier()


@on_ranks(*SIZES)
def test_accumulation(world):
    """Ranks may accumulate different numbers of gradients under no_sync()."""
    for net, ddp, optimizer in fused_and_not(world):

        def accumulate(step, loss, net=net, ddp=ddp):
            with ddp.no_sync():
                for _ in range(world.rank + 1):
                    net(inputs(world, step)).sum().backward()
            loss.backward()

        train(net, optimizer, world, do=accumulate)
        world.barrier()


@on_ranks(*SIZES)
def test_closure(world):
    net = nn.Linear(3, 1)
    ddp = lockstep.DistributedDataParallel(net, world)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)
    x = torch.ones(4, 3)

    def closure():
        optimizer.zero_grad()
        loss = (net(x) - 3).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    world.barrier()
    del ddp


@on_ranks(*SIZES)
def test_two_optimizers_at_their_own_rates(world):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    ddp = lockstep.DistributedDataParallel(net, world)
    both = [torch.optim.Adam(part.parameters()) for part in net]
    for step in range(STEPS):
        net.zero_grad()
        net(inputs(world, step)).square().mean().backward()
        both[0].step()
        if step % 2 == 0:
            both[1].step()
    world.barrier()
    del ddp


@on_ranks(*SIZES)
def test_probe_of_one_rank(world):
    for net, _ddp, optimizer in fused_and_not(world):
        probe = nn.Linear(3, 1)
        of_probe = torch.optim.SGD(probe.parameters(), lr=0.1)

        def do(step, loss, net=net, probe=probe, of_probe=of_probe):
            loss.backward()
            if world.rank == 0:
                of_probe.zero_grad()
                (probe(inputs(world, step)) - net(inputs(world, step)).detach()).square().mean().backward()
                of_probe.step()

        train(net, optimizer, world, do=do)
        world.barrier()


@on_ranks(*SIZES)
def test_join_of_uneven_ranks(world):
    for net, ddp, optimizer in fused_and_not(world):
        for _ in range(2):
            lockstep.join(ddp, lambda net=net, optimizer=optimizer: train(net, optimizer, world, steps=2 + world.rank))
            if isinstance(optimizer, lockstep.optim.SGD):
                train(net, optimizer, world)
        train(net, optimizer, world)
        world.barrier()


@on_ranks(*SIZES)
def test_over_the_backend(world):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # imports for seconds

    with process_group():
        net = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), world, leave_out_on_all(world))
        # More ranks than parameters: some have nothing to update.
        train(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.1), world)
        if world.rank == 0:
            probe = nn.Linear(3, 1)
            train(probe, torch.optim.SGD(probe.parameters(), lr=0.1), world)
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), world)


@on_ranks(*SIZES)
def test_join_over_the_backend(world):
    from torch.distributed.algorithms.join import Join

    with process_group():
        net = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        train(net, optimizer, world)
        with Join([net]):
            train(net, optimizer, world, steps=2 + world.rank)
        train(net, optimizer, world)


@on_ranks(*SIZES)
def test_communication_hook_over_the_backend(world):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    with process_group():
        net = nn.parallel.DistributedDataParallel(nn.Linear(30, 10))
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(STEPS):
            optimizer.zero_grad()
            net(torch.randn(4, 30)).square().mean().backward()
            optimizer.step()


@on_ranks(*SIZES)
def test_horovod(world):
    """Ranks may call backward() less often than backward_passes_per_step, and all may leave a step out."""
    net = nn.Linear(3, 1)
    train(net, hvd_optimizer(net), world, leave_out_on_all(world))
    optimizer = hvd_optimizer(net, backward_passes_per_step=3)
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(world.rank):
            net(inputs(world, step)).square().mean().backward()
        optimizer.step()
    assert len({value.item() for value in hvd.allgather(net.weight.detach().sum().view(1))}) == 1
