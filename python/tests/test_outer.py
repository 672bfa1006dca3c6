"""Outer optimizers between hosts, with torch's DistributedDataParallel and that of the package."""

import copy
import os
import pathlib
import random
import subprocess
import sys
import tempfile
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_host_sync import check_equal, distance, inputs_of, make_net, train, with_each_backend
from torch import nn

import lockstep

PROGRAM = pathlib.Path(__file__).with_name("outer_training.py")
EVERY, ROUNDS = 3, 3
METHODS = [
    lockstep.DiLoCo(learning_rate=0.7),
    lockstep.DiLoCo(learning_rate=0.7, payload="bfloat16"),
    lockstep.DiLoCo(learning_rate=0.7, payload="int8"),
    lockstep.DiLoCo(learning_rate=0.7, payload="int4"),
    lockstep.SparseLoCo(),
]


def reference(size):
    """The parameters after each round, with torch.optim.SGD as the outer optimizer, in float64."""
    hosts = [[0, 1], list(range(2, size))]
    nets = [make_net() for _ in hosts]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    common = [p.detach().double().requires_grad_() for p in nets[0].parameters()]
    outer = torch.optim.SGD(common, lr=0.7, momentum=0.9, nesterov=True)
    found = []
    for step in range(EVERY * ROUNDS):
        for net, optimizer, ranks in zip(nets, optimizers, hosts, strict=True):
            optimizer.zero_grad()
            for rank in ranks:
                (net(inputs_of(rank, step)).square().mean() / len(ranks)).backward()
            optimizer.step()
        if step % EVERY == EVERY - 1:
            with torch.no_grad():
                for i, theta in enumerate(common):
                    differences = [theta - list(net.parameters())[i] for net in nets]
                    theta.grad = sum(d * (len(r) / size) for d, r in zip(differences, hosts, strict=True))
                outer.step()
                for net in nets:
                    for parameter, theta in zip(net.parameters(), common, strict=True):
                        parameter.copy_(theta)
            found.append(copy.deepcopy(nets[0]))
    return found


def check_methods(backend, rank, size):
    expected = reference(size)[-1]
    for method, bound in zip(METHODS, (1e-5, 2e-3, 4e-3, 5e-2, None), strict=True):
        net = make_net()
        ddp = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
        hosts = lockstep.HostSync(ddp, every=EVERY, outer=method)
        train(rank, ddp, EVERY * ROUNDS)
        hosts.sync()  # the last round; the others came with the forwards
        check_equal(net)
        if bound is not None:
            assert distance(net, expected) < bound, (backend, method)
        own = copy.deepcopy(net)
        train(rank, ddp, 1)
        assert distance(net, own) > 0
        hosts.with_global_copy(lambda net=net, own=own: check_is(net, own))
        assert distance(net, own) > 0, "its own parameters again"


def check_is(net, other):
    assert distance(net, other) == 0


@on_ranks(3, 4)
def test_rounds_with_torchs_ddp(world):
    with_each_backend(world, check_methods)


def check_resume(backend, rank, size):
    for method in METHODS[2:]:
        nets = []
        for is_stopped in (False, True):
            net = make_net()
            ddp = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
            hosts = lockstep.HostSync(ddp, every=EVERY, outer=method)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
            for step in range(8):
                if is_stopped and step == 4:  # between two rounds
                    saved = copy.deepcopy([net.state_dict(), optimizer.state_dict(), hosts.state_dict()])
                    net = make_net()
                    ddp = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
                    hosts = lockstep.HostSync(ddp, every=EVERY, outer=method)
                    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
                    for one, state in zip((net, optimizer, hosts), saved, strict=True):
                        one.load_state_dict(state)
                optimizer.zero_grad()
                ddp(inputs_of(rank, step)).square().mean().backward()
                optimizer.step()
            hosts.sync()
            nets.append(net)
        check_is(*nets)


@on_ranks(4)
def test_state_resumes_with_the_same_bits(world):
    with_each_backend(world, check_resume)


@on_ranks(1, 2, 3)
def test_round_follows_the_step_of_an_optimizer(world):
    for fused in (False, True):
        torch.manual_seed(1)
        net = nn.Linear(5, 2)
        ddp = lockstep.DistributedDataParallel(
            net, world, average_hosts_every=2, outer=lockstep.DiLoCo(learning_rate=0.5, momentum=0.0)
        )
        optimizer = lockstep.optim.SGD(ddp, lr=0.1) if fused else torch.optim.SGD(net.parameters(), lr=0.1)
        begun = net.weight.detach().clone()
        twin = copy.deepcopy(net)
        plain = torch.optim.SGD(twin.parameters(), lr=0.1)
        for step in range(4):
            for model, opt in ((net, optimizer), (twin, plain)):
                opt.zero_grad()
                model(torch.full((3, 5), 1.0 + step)).square().mean().backward()
                opt.step()
            if step % 2 == 1:
                with torch.no_grad():  # half of the way
                    twin.weight.copy_(begun + 0.5 * (twin.weight - begun))
                    twin.bias.copy_(net.bias)
                begun = twin.weight.detach().clone()
            assert torch.allclose(net.weight, twin.weight, atol=1e-6), (fused, step)
        assert ddp.with_global_copy(lambda net=net: net.weight.sum().item()) == net.weight.sum().item()
        del ddp, optimizer


@on_ranks(1, 2)
def test_step_that_a_loss_scaler_skips_counts(world):
    for fused in (False, True):
        torch.manual_seed(1)
        net = nn.Linear(5, 2)
        ddp = lockstep.DistributedDataParallel(
            net, world, average_hosts_every=2, outer=lockstep.DiLoCo(learning_rate=0.5, momentum=0.0)
        )
        optimizer = lockstep.optim.SGD(ddp, lr=0.1) if fused else torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        begun = net.weight.detach().clone()
        for step in range(2):
            optimizer.zero_grad()
            factor = float("inf") if step == 1 else 1.0
            scaler.scale(net(torch.ones(3, 5)).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            if step == 0:
                after = net.weight.detach().clone()
        # The round came with the second step, which was skipped: half of the way of the first.
        assert torch.allclose(net.weight, begun + 0.5 * (after - begun), atol=1e-6), fused
        assert not torch.equal(begun, after)
        del ddp, optimizer


@on_ranks(2)
def test_training_state_saves_what_hosts_need(world):
    with tempfile.TemporaryDirectory() as folder:
        folder = world.broadcast_object(folder, 0)

        def make():
            torch.manual_seed(1)
            net = nn.Linear(5, 2)
            ddp = lockstep.DistributedDataParallel(
                net, world, average_hosts_every=3, outer=lockstep.DiLoCo(payload="int8")
            )
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
            state = lockstep.checkpoint.TrainingState(world, folder)
            state.add("model", net).add("optimizer", optimizer, net).add("ddp", ddp)
            state.resume()
            return net, ddp, optimizer, state

        def advance(net, optimizer, steps):
            for step in steps:
                optimizer.zero_grad()
                net(torch.full((3, 5), 1.0 + step + world.rank)).square().mean().backward()
                optimizer.step()

        net, ddp, optimizer, state = make()
        advance(net, optimizer, range(4))
        state.save(4)
        advance(net, optimizer, range(4, 8))
        expected = net.weight.detach().clone()
        del net, ddp, optimizer, state
        net, ddp, optimizer, state = make()
        advance(net, optimizer, range(4, 8))
        assert torch.equal(net.weight, expected)
        del state, ddp
        world.barrier()


@on_ranks(2, 3, over="tcp")
def test_hooks_that_lose(world):
    def train_with(make_hook, stop_at=None):
        hook = make_hook and make_hook()
        torch.manual_seed(1)
        net = nn.Linear(64, 48)
        ddp = lockstep.DistributedDataParallel(net, world, hook=hook)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        losses = []
        for step in range(60):
            if step == stop_at:
                layout, saved = ddp.stats()["layout"], copy.deepcopy(hook.state_dict())
                hook = make_hook()
                hook.load_state_dict(saved)
                del ddp
                ddp = lockstep.DistributedDataParallel(net, world, hook=hook, bucket_layout=layout)
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + world.rank))
            optimizer.zero_grad()
            loss = (net(x) - x[:, :1]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert world.all_gather_object(net.weight.sum().item()) == [net.weight.sum().item()] * world.size
        return net, losses

    dense, losses = train_with(None)
    assert losses[-1] < 0.5 * losses[0]
    low_rank = partial(lockstep.PowerSGD, rank=4, dense_steps=2)
    for make_hook, most in ((low_rank, 0.05), (lockstep.Int8, 0.001)):
        net, approximated = train_with(make_hook)
        assert distance(net, dense) > 1e-6, f"{make_hook} is an approximation"
        assert abs(approximated[-1] - losses[-1]) < most * losses[0], make_hook
        check_is(net, train_with(make_hook, stop_at=25)[0])
    for arguments in ({"rank": 9}, {"dense_steps": -1}):
        with pytest.raises(lockstep.UsageError, match="expected"):
            lockstep.PowerSGD(**arguments)
    with pytest.raises(lockstep.UsageError, match="without bf16_compress"):
        lockstep.DistributedDataParallel(net, world, hook=lockstep.PowerSGD(), bf16_compress=True)


@on_ranks(1)
def test_wrong_options(world):
    net = nn.Linear(2, 2)
    for words, outer in (
        ("expected a lockstep.DiLoCo", "diloco"),
        ('payload is "int3"; expected "float32"', lockstep.DiLoCo(payload="int3")),
        ("momentum is 1.500000; expected 0 or more", lockstep.DiLoCo(momentum=1.5)),
        ("keep is 0; expected 1 to 4096", lockstep.SparseLoCo(keep=0)),
    ):
        with pytest.raises(lockstep.UsageError, match=words):
            lockstep.DistributedDataParallel(net, world, average_hosts_every=2, outer=outer)
    for make in (lambda: lockstep.DiLoCo(warm_up=1.5), lambda: lockstep.SparseLoCo(keep="64")):
        with pytest.raises(lockstep.UsageError, match="expected a value like"):
            make()
    ddp = lockstep.DistributedDataParallel(net, world, average_hosts_every=2)
    with pytest.raises(lockstep.UsageError, match="there is no outer optimizer"):
        ddp.with_global_copy(print)
    ddp.compare_replicas()
    dist.init_process_group("gloo")
    try:
        plain = nn.parallel.DistributedDataParallel(net)
        with pytest.raises(lockstep.UsageError, match="outer is 7; expected a lockstep.DiLoCo"):
            lockstep.HostSync(plain, every=2, outer=7)
    finally:
        dist.destroy_process_group()


RUNS = int(os.environ.get("OUTER_KILLS", "1"))  # of each method; by default of one method only


@pytest.mark.parametrize("method", ("int8", "average", "warm-up", "sparse") if RUNS > 1 else ("int8",))
def test_killed_host_resumes_with_the_same_bits(tmp_path, method):
    expected, said = run_program(tmp_path / "straight", method, 0)
    assert "resumed from step 0" in said
    for number in range(RUNS):
        weights, said = run_program(tmp_path / str(number), method, random.Random(number).uniform(0.1, 0.6))
        assert weights == expected, said


def test_horovod(tmp_path):
    run_program(tmp_path / "horovod", "horovod", 0)


def run_program(folder, method, seconds):
    """Returns the weights, which are equal on all four ranks, and the output."""
    folder.mkdir()
    words = [os.environ["LOCKSTEP_PROGRAM"], "run", "-n", "4", "--bind", "none", "--max-restarts", "1", "--"]
    words += [sys.executable, str(PROGRAM), str(folder), method, str(seconds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    weights = {(folder / str(rank)).read_text() for rank in range(4)}
    assert len(weights) == 1, "all hosts are equal after a round"
    return weights.pop(), done.stdout
