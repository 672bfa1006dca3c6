"""lockstep.horovod beside one rank with the whole batch, and Horovod's rules."""

import gzip
import os
import pathlib
import subprocess
import sys

import lockstep.horovod as hvd
import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn import functional

import lockstep

DATA = pathlib.Path(__file__).parents[3] / "shared/data/mnist"
STEPS = 6


@on_ranks(1, 2, 3)
def test_operations(world):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    assert (rank, size, hvd.local_rank(), hvd.cross_size()) == (world.rank, world.size, world.rank, 1)
    x = torch.full((3,), float(rank + 1))
    total = size * (size + 1) / 2
    assert torch.equal(hvd.allreduce(x, name="x"), torch.full((3,), total / size))
    assert torch.equal(hvd.allreduce(x, average=False), torch.full((3,), total))
    assert hvd.allreduce(x, op=hvd.Max)[0] == size and hvd.allreduce(x, op=hvd.Min)[0] == 1
    assert hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4)[0] == 2 * total
    assert hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16).dtype == torch.float32
    assert x[0] == rank + 1, "allreduce() leaves its argument"
    assert hvd.allreduce(torch.tensor([rank + 1])).item() == int(total / size)
    assert [one[0].item() for one in hvd.synchronize(hvd.grouped_allreduce_async([x, 2 * x], op=hvd.Sum))] == [
        total,
        2 * total,
    ]
    handle = hvd.allreduce_async_(x, op=hvd.Sum)
    assert hvd.synchronize(handle) is x and hvd.poll(handle) and x[0] == total
    gathered = hvd.allgather(torch.full((rank + 1, 2), rank))
    assert gathered.shape == (total, 2) and gathered[-1, 0] == size - 1
    assert hvd.broadcast(torch.tensor([rank]), root_rank=size - 1).item() == size - 1
    y = torch.tensor([rank])
    assert hvd.broadcast_(y, 0) is y and y.item() == 0
    equal = hvd.alltoall(torch.arange(size * 2) + 100 * rank)
    assert equal.tolist() == [100 * peer + 2 * rank + i for peer in range(size) for i in (0, 1)]
    rows, counts = hvd.alltoall(torch.arange(size * 2), splits=torch.tensor([2] * size))
    assert counts.tolist() == [2] * size and len(rows) == 2 * size
    assert hvd.broadcast_object({"lr": rank}, 0) == {"lr": 0} and hvd.allgather_object(rank) == list(range(size))
    assert hvd.is_homogeneous()
    hvd.barrier()


@on_ranks(2)
def test_gradients_flow_through_operations(world):
    hvd.init()
    for function, expected in (
        (lambda x: hvd.allreduce(x, op=hvd.Sum) * (world.rank + 1), 3),
        (lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[1] * (world.rank + 1), 3),
        # Means, as Horovod's are.
        (lambda x: hvd.allgather(x)[world.rank] * (world.rank + 1), (world.rank + 1) / 2),
        (lambda x: hvd.broadcast(x, 1) * (world.rank + 1), 1.5 if world.rank == 1 else 0),
    ):
        x = torch.ones(1, requires_grad=True)
        function(x).sum().backward()
        assert x.grad.item() == expected
    x = torch.ones(3, requires_grad=True)
    rows, counts = hvd.alltoall(x, splits=torch.tensor([1, 2]))
    assert len(rows) == 2 * (world.rank + 1) and counts.dtype == torch.int32
    (rows * (world.rank + 1)).sum().backward()
    assert x.grad.tolist() == [1, 2, 2]


@on_ranks(1, 2, 3)
def test_alltoall_of_unequal_parts(world):
    """Of no rows too, of columns of another tensor, and of more bytes than one round of the exchange sends."""
    hvd.init()
    for most in (2, 1_500_000):
        splits = [most * ((world.rank + peer) % world.size) for peer in range(world.size)]
        table = torch.arange(2.0 * sum(splits)).view(-1, 2) + world.rank
        rows, counts = hvd.alltoall(table[:, 1], splits=torch.tensor(splits))
        expected = []
        for peer in range(world.size):
            sent = [most * ((peer + receiver) % world.size) for receiver in range(world.size)]
            first = sum(sent[: world.rank])
            expected.append(2.0 * torch.arange(first, first + sent[world.rank]) + 1 + peer)
        assert torch.equal(rows, torch.cat(expected)) and counts.tolist() == [len(part) for part in expected]
    assert hvd.alltoall(torch.ones(0, 3)).shape == (0, 3)


@on_ranks(2, fresh=True)
def test_alltoall_of_other_rows_is_refused(world):
    hvd.init()
    with pytest.raises(lockstep.DesyncError, match=r"float32\[3\] rows.*float32\[2\] rows|float32\[2\].*float32\[3\]"):
        hvd.alltoall(torch.ones(2, 2 + world.rank))


class Net(nn.Module):
    """The network of Horovod's pytorch_mnist.py, without dropout, whose random numbers differ between ranks."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.fc1, self.fc2, self.unused = nn.Linear(320, 50), nn.Linear(50, 10), nn.Linear(2, 2)

    def forward(self, x):
        x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
        x = functional.relu(functional.max_pool2d(self.conv2(x), 2))
        return functional.log_softmax(self.fc2(functional.relu(self.fc1(x.view(-1, 320)))), dim=1)


def batches(number, count):
    """Images and labels of a step: real ones, if the data for tests is there."""
    if not DATA.exists():
        generator = torch.Generator().manual_seed(number)
        return torch.randn(count, 1, 28, 28, generator=generator), torch.randint(10, (count,), generator=generator)

    def read(name, header, *shape):
        data = gzip.open(DATA / name).read()
        values = torch.frombuffer(bytearray(data[header:]), dtype=torch.uint8).reshape(-1, *shape)
        return values[number * count : (number + 1) * count]

    images = read("t10k-images-idx3-ubyte.gz", 16, 1, 28, 28).float() / 255
    return (images - 0.1307) / 0.3081, read("t10k-labels-idx1-ubyte.gz", 8).long()


def train(make, world, passes=1, optimize=lambda optimizer: optimizer.step(), kind=torch.optim.SGD, **options):
    """Returns the losses of the whole batches, and the weights."""
    torch.manual_seed(42 + (world.rank if world is not None else 0))
    net = Net()
    if world is None:
        rank, size = 0, 1
    else:
        rank, size = world.rank, world.size
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = make(net, kind(net.parameters(), **options))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            x, y = batches(step * passes + part, 24)
            own = slice(rank * 24 // size, (rank + 1) * 24 // size)
            loss = functional.nll_loss(net(x[own]), y[own]) / passes
            loss.backward()
            losses.append(loss.item() if world is None else hvd.allreduce(loss.detach()).item())
        optimize(optimizer)
    return losses, [p.detach() for p in net.parameters()]


def distributed(**options):
    return lambda net, optimizer: hvd.DistributedOptimizer(
        optimizer, named_parameters=net.named_parameters(), **options
    )


def expect_equal(found, expected, tolerance=1e-5):
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=tolerance, atol=tolerance)
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=tolerance)


@on_ranks(1, 2, 4)
def test_losses_of_one_rank(world):
    hvd.init()
    for kind, options in ((torch.optim.SGD, {"lr": 0.05, "momentum": 0.5}), (torch.optim.Adam, {"lr": 0.001})):
        for passes in (1, 4):
            expected = train(lambda net, optimizer: optimizer, None, passes, kind=kind, **options)
            made = distributed(backward_passes_per_step=passes)
            expect_equal(train(made, world, passes, kind=kind, **options), expected)
    sgd = {"lr": 0.05, "momentum": 0.5}
    expected = train(lambda net, optimizer: optimizer, None, **sgd)
    expect_equal(train(distributed(gradient_predivide_factor=2.0), world, **sgd), expected)
    expect_equal(train(distributed(compression=hvd.Compression.fp16), world, **sgd), expected, 3e-3)


@on_ranks(2)
def test_clipping_between_synchronize_and_step(world):
    hvd.init()

    def clipped(optimizer):
        if isinstance(optimizer, hvd._DistributedOptimizer):
            optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)
        if isinstance(optimizer, hvd._DistributedOptimizer):
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()

    sgd = {"lr": 0.5}
    expected = train(lambda net, optimizer: optimizer, None, optimize=clipped, **sgd)
    expect_equal(train(distributed(), world, optimize=clipped, **sgd), expected)


@on_ranks(2)
def test_schedules_made_before_and_hooks(world):
    """The step of a schedule's making reduces too, and hooks of step() run once, also after load_state_dict()."""
    hvd.init()
    p = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=[("p", p)])
    optimizer.load_state_dict(optimizer.state_dict())
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for _ in range(2):
        optimizer.zero_grad()
        (p.sum() * (1 + 2 * world.rank)).backward()
        optimizer.step()
        schedule.step()
    assert p.tolist() == [1 - 2 - 1] * 2 and optimizer.param_groups[0]["lr"] == 0.25 and len(calls) == 2


@on_ranks(3)
def test_optimizer_state_is_broadcast(world):
    hvd.init()
    p = torch.full((2, 3), float(world.rank), requires_grad=True)
    optimizer = torch.optim.AdamW([{"params": [p], "lr": 0.1 + world.rank}])
    for _ in range(world.rank + 1 if world.rank != 1 else 0):  # rank 1 has no state
        p.grad = torch.full_like(p, float(world.rank + 1))
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=2)
    state = optimizer.state_dict()["state"][0]
    assert optimizer.param_groups[0]["lr"] == 2.1 and state["step"] == 3
    everyone = world.all_gather_object(state["exp_avg"])
    assert all(torch.equal(one, everyone[2]) for one in everyone)
    hvd.broadcast_parameters([p], root_rank=2)
    assert torch.equal(p, world.all_gather_object(p.detach())[2])


@on_ranks(2)
def test_bytes_with_several_passes(world):
    """Four backward passes per step send a quarter of the gradients of four steps."""
    hvd.init()
    counts = []
    for passes in (1, 4):
        p = torch.ones(1000, requires_grad=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), backward_passes_per_step=passes)
        calls = []
        original = world.all_reduce_async
        world.all_reduce_async = lambda tensor, *a, calls=calls, o=original, **k: (
            calls.append(tensor.nbytes) or o(tensor, *a, **k)
        )
        try:
            for backward in range(8):
                (p.sum() * (world.rank + 1)).backward()
                if (backward + 1) % passes == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        finally:
            del world.all_reduce_async
        counts.append(sum(calls))
    assert counts == [8 * 4000, 2 * 4000]


@on_ranks(2)
def test_what_is_refused(world):
    hvd.init()
    p = torch.ones(2, requires_grad=True)
    for wrong, message in (
        (lambda: hvd.allreduce(p, op=hvd.Adasum), "Adasum"),
        (lambda: hvd.elastic.ElasticSampler, "--max-restarts"),
        (lambda: hvd.join(), "lockstep.join"),
        (lambda: hvd.run(None), "lockstep run"),
        (lambda: hvd.allreduce(p, process_set=hvd.ProcessSet()), "split"),
        (lambda: hvd.init(comm=[0]), "split"),
    ):
        with pytest.raises(lockstep.UsageError, match=message):
            wrong()
    optimizer = torch.optim.SGD([p], lr=1)
    with pytest.raises(ValueError, match="not named"):
        hvd.DistributedOptimizer(optimizer, named_parameters=[])
    with pytest.raises(ValueError, match="unique"):
        hvd.DistributedOptimizer(optimizer, named_parameters=[("a", p), ("a", p)])
    with pytest.raises(ValueError, match="predivide"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Sum, gradient_predivide_factor=2.0)
    made = hvd.DistributedOptimizer(optimizer, named_parameters=[("a", p)])
    assert made is optimizer and isinstance(made, torch.optim.SGD)
    with pytest.raises(lockstep.UsageError, match="closure"):
        made.step(lambda: 1)
    made.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        made.step()


def test_not_initialized():
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.rank()
    assert "horovod" not in sys.modules and "HOROVOD_RANK" not in os.environ


ELASTIC = """\
import os, signal, sys
import lockstep.horovod as hvd, torch
hvd.init()
torch.manual_seed(hvd.rank())
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
state = hvd.elastic.TorchState(net, optimizer, schedule=schedule, epoch=0, batch=0, seen=[])
state.register_reset_callbacks([lambda: print("continues at", state.epoch, state.batch, flush=True)])

@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 2):
        for state.batch in range(state.batch, 6):
            generator = torch.Generator().manual_seed(100 * state.epoch + 10 * state.batch + hvd.rank())
            if (state.epoch, state.batch) == (1, 4) and hvd.rank() == 1 and sys.argv[1:] == ["kill"]:
                if os.environ["LOCKSTEP_GENERATION"] == "0":
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = net(torch.randn(8, 4, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            if state.batch % 2:
                state.seen = [*state.seen, state.batch]
                state.batch += 1
                state.commit()
        state.batch = 0
    return loss.item()

print("ends with", repr(train(state)), state.seen, optimizer.param_groups[0]["lr"], flush=True)
"""


def test_elastic_state_continues_after_a_restart(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ELASTIC)
    ends = []
    for words in ([], ["kill"]):
        command = [os.environ["LOCKSTEP_PROGRAM"], "run", "-n", "2", "--max-restarts", "1", "--restart-pause", "0"]
        done = subprocess.run(
            [*command, sys.executable, script, *words], capture_output=True, text=True, timeout=120, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("continues at 1 4" in done.stdout) == bool(words), done.stdout
        ends.append(sorted(line for line in done.stdout.splitlines() if "ends with" in line))
        assert not list(tmp_path.glob("runs/elastic-*"))
    assert ends[0] == ends[1] and "[1, 3, 5, 1, 3, 5]" in ends[0][0], ends


SWEEP = """\
import os, sys
os.getpid = lambda: 1  # as in a container
import lockstep.horovod as hvd, torch
hvd.init()
net = torch.nn.Linear(2, 2)
state = hvd.elastic.TorchState(net, torch.optim.SGD(net.parameters(), lr=0.1), epoch=0)

@hvd.elastic.run
def train(state):
    print("begins at", state.epoch, flush=True)
    state.epoch += 1
    state.commit()
    if sys.argv[1] == "wait":
        sys.stdin.readline()
    elif sys.argv[1:] != ["finish"] and state.epoch < 2:
        raise LookupError("a failure")

train(state)
"""


def test_elastic_states_of_other_runs(tmp_path):
    """A run neither removes the commits of another one that is running, nor continues those of another one."""
    script = tmp_path / "script.py"
    script.write_text(SWEEP)

    def start(*words, **variables):
        return subprocess.Popen(
            [sys.executable, script, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **variables},
        )

    waiting = start("wait")
    assert "begins at 0" in waiting.stdout.readline()
    while not list(tmp_path.glob("runs/elastic-*/*-step-1")):
        assert waiting.poll() is None
    output, _ = start("finish").communicate(timeout=240)
    assert "begins at 0" in output
    assert len(list(tmp_path.glob("runs/elastic-*/*-step-1"))) == 1, output
    waiting.communicate("\n", timeout=240)
    assert waiting.returncode == 0 and not list(tmp_path.glob("runs/elastic-*"))

    launcher = [os.environ["LOCKSTEP_PROGRAM"], "run", "-n", "2", sys.executable, str(script)]
    slurm = {**os.environ, "SLURM_JOB_ID": "77"}
    outputs = [
        subprocess.run([*launcher, rate], capture_output=True, text=True, timeout=240, cwd=tmp_path, env=slurm)
        for rate in ("lr=1", "lr=2", "lr=1")
    ]
    assert [one.stdout.count("begins at 0") for one in outputs] == [2, 2, 0], outputs
    assert "continues from commit 1, " in outputs[2].stderr and "continues" not in outputs[1].stderr, outputs
    assert outputs[2].returncode == 0, outputs[2]
