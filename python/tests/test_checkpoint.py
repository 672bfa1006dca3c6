"""lockstep.checkpoint: a training that resumes has the same bits, with fused optimizers and torch's; and what is
refused."""

import os
import pathlib
import random
import subprocess
import sys
import tempfile

import numpy
import pytest
import torch
from ranks import on_ranks
from torch import nn

import lockstep
from lockstep.checkpoint import TrainingState
from lockstep.data import DataLoader


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.tied = self.last

    def forward(self, x):
        return self.last(nn.functional.dropout(self.norm(self.first(x)), 0.2))


class Training:
    def __init__(self, world, folder, kind, seed=1, **options):
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        self.world, self.net = world, Net()
        self.ddp = lockstep.DistributedDataParallel(self.net, world)
        torch.manual_seed(seed + world.rank)
        self.optimizer = (
            lockstep.optim.AdamW(self.ddp, lr=0.1)
            if kind == "fused"
            else torch.optim.AdamW(self.net.parameters(), lr=0.1)
            if kind == "torch"
            else torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        )
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.loader = DataLoader(torch.arange(144.0).view(36, 4) / 144, world, batch_size=2, seed=3)
        self.state = TrainingState(world, folder, settings={"batch_size": 2}, **options)
        self.state.add("model", self.net).add("optimizer", self.optimizer, self.net).add("schedule", self.schedule)
        self.state.add("loader", self.loader).add("best", 1.0).add("text", "none").add_random_state()
        self.state.add("ddp", self.ddp)

    def train(self, steps):
        """Returns what a step could change: losses, random numbers and the weights."""
        seen = []
        while len(seen) < steps:
            for batch in self.loader:
                self.optimizer.zero_grad()
                loss = self.net(batch).square().mean()
                loss.backward()
                self.optimizer.step()
                self.schedule.step()
                self.state["best"] += 0.5  # equal on all ranks
                seen.append((loss.item(), random.random(), numpy.random.rand(), self.state["best"]))
                if len(seen) == steps:
                    break
        weights = torch.cat([p.detach().reshape(-1) for p in self.net.state_dict().values()])
        return seen, weights.clone()

    def close(self):
        del self.state, self.optimizer, self.ddp


@on_ranks(1, 2, 3)
def test_resumed_training_has_the_same_bits(world):
    for kind in ("fused", "torch", "sgd"):
        folder = shared_folder(world)
        training = Training(world, folder, kind)
        assert not training.state.resume() and training.state.path is None
        training.train(5)
        training.state["text"] = "saved"
        report = training.state.save(5)
        assert pathlib.Path(report.path).is_dir() and report.num_bytes > 500
        expected = training.train(7)
        training.state.save_async(12)
        later = training.train(2)
        assert training.state.wait().path != report.path
        training.close()
        resumed = Training(world, folder, kind, seed=9)
        assert resumed.state.resume() and resumed.state.step == 12 and not resumed.state.is_finished
        assert resumed.state["text"] == "saved" and resumed.state.bucket_layout("ddp") == ""
        found = resumed.train(2)
        assert found[0] == later[0] and torch.equal(found[1], later[1])
        resumed.close()
        other = Training(world, shared_folder(world), kind, seed=9, resume_from=report.path)
        assert other.state.resume() and other.state.step == 5
        found = other.train(7)
        assert found[0] == expected[0] and torch.equal(found[1], expected[1])
        other.state.save(12, finished=True)
        other.close()


def shared_folder(world):
    return world.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else None, 0)


@on_ranks(2)
def test_what_does_not_fit_is_refused(world):
    folder = shared_folder(world)
    net = nn.Linear(3, 2)
    state = TrainingState(world, folder, settings={"batch_size": 2})
    state.add("model", net).add("count", 3)
    with pytest.raises(lockstep.UsageError, match="already added"):
        state.add("count", 4)
    with pytest.raises(lockstep.UsageError, match="another type"):
        state["count"] = "three"
    with pytest.raises(lockstep.UsageError, match="no value"):
        state["other"]
    with pytest.raises(lockstep.UsageError, match="cannot be saved"):
        state.add("optimizer", torch.optim.LBFGS(net.parameters()), net)
    with pytest.raises(lockstep.UsageError, match="names its parameters"):
        state.add("optimizer", torch.optim.SGD(net.parameters(), 0.1))
    with pytest.raises(lockstep.UsageError, match="expected a module"):
        state.add("function", print)
    assert not state.resume()
    state.save(1)
    del state

    def refused(match, settings, **members):
        again = TrainingState(world, folder, settings=settings)
        for name, member in members.items():
            again.add(name, member)
        with pytest.raises(lockstep.UsageError, match=match):
            again.resume()
        del again

    refused('setting "batch_size" is 3; expected 2', {"batch_size": 3}, model=net, count=3)
    refused('"weight" of "model" has another shape', {"batch_size": 2}, model=nn.Linear(4, 2), count=3)
    refused('"bias" of "model" is unexpected', {"batch_size": 2}, model=nn.Linear(3, 2, bias=False), count=3)
    refused('has state of "count"', {"batch_size": 2}, model=net)
    refused('no state of "other"', {"batch_size": 2}, model=net, count=3, other=nn.Linear(1, 1))
    reading = TrainingState(world, None, resume_from=folder)
    assert reading.step == 1 and reading.read("values") == {"count": 3}
    assert sorted(reading.unknown_parts) == ["count", "model"]
    del reading


def schedules_of(optimizer):
    lr = torch.optim.lr_scheduler
    return {
        "steps": lr.MultiStepLR(optimizer, [3, 6, 6], 0.5),
        "sequence": lr.SequentialLR(
            optimizer, [lr.LinearLR(optimizer, 0.1, 1.0, 3), lr.CosineAnnealingLR(optimizer, 6)], [3]
        ),
        "lambda": lr.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "cycle": lr.OneCycleLR(optimizer, 0.5, 20),
        "plateau": lr.ReduceLROnPlateau(optimizer, patience=1),
    }


@on_ranks(2)
def test_schedules(world):
    """The rates after a resume are those without it."""
    for kind in ("steps", "sequence", "lambda", "cycle", "plateau"):
        folder, rates = shared_folder(world), []
        for resumed in (False, True):
            net = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            schedule = schedules_of(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))[kind]
            optimizer, schedule = schedule.optimizer, schedule
            state = TrainingState(world, folder).add("optimizer", optimizer, net).add("schedule", schedule)
            assert state.resume() == resumed
            for step in range(4, 12) if resumed else range(12):
                optimizer.step()
                schedule.step(1.0) if kind == "plateau" else schedule.step()
                if not resumed and step == 3:
                    state.save(4)
                if step >= 4:
                    rates.append(optimizer.param_groups[0]["lr"])
            del state
        assert rates[:8] == rates[8:] and len(set(rates)) > 1, (kind, rates)


@on_ranks(1)
def test_a_state_that_is_no_longer_used_is_freed(world):
    import gc
    import weakref

    folder = shared_folder(world)
    net = nn.Linear(2, 2)
    state = TrainingState(world, folder).add("model", net)
    seen = weakref.ref(net)
    del state, net
    gc.collect()
    assert seen() is None


@on_ranks(2)
def test_state_of_an_object_of_the_program(world):
    class Averages:
        def __init__(self):
            self.values = {"list": [1, 2.5, None], "nested": {"a": [True]}, "tensor": torch.zeros(2), "text": "json:x"}

        def state_dict(self):
            return self.values

        def load_state_dict(self, state):
            self.values = state

    folder = shared_folder(world)
    saved, own = Averages(), Averages()
    saved.values["tensor"] = torch.tensor([1.0, 2.0])
    saved.values["list"].append(7)
    own.values["text"] = f"of rank {world.rank}"
    state = TrainingState(world, folder)
    state.add("averages", saved).add("own", own, each_rank=True)
    state.resume()
    state.save(1)
    del state
    loaded, mine = Averages(), Averages()
    state = TrainingState(world, folder)
    state.add("averages", loaded).add("own", mine, each_rank=True)
    assert state.resume()
    assert torch.equal(loaded.values.pop("tensor"), saved.values.pop("tensor")) and loaded.values == saved.values
    assert mine.values["text"] == f"of rank {world.rank}"
    with pytest.raises(lockstep.UsageError, match="has the type dict"):
        loaded.values["numbers"] = {1: "one"}  # JSON would make the key a string
        state.save(2)
    del loaded.values["numbers"]
    with pytest.raises(lockstep.UsageError, match="has the type object"):
        loaded.values["object"] = object()
        state.save(2)
    del state


def state_of(folder, resume):
    """What python/tests/state_exchange.cc does, in Python."""
    world = lockstep.init()
    net = nn.Linear(3, 2)
    with torch.no_grad():
        net.weight.copy_(torch.arange(6.0).view(2, 3))
        net.bias.fill_(0 if resume else 1)
    optimizer = torch.optim.AdamW(net.parameters(), 1.0 if resume else 0.25, weight_decay=0.5)
    loader = DataLoader([torch.full((1,), float(i)) for i in range(12)], world, batch_size=2, seed=3)
    state = TrainingState(world, folder, settings={"batch_size": 2})
    state.add("model", net).add("optimizer", optimizer, net).add("loader", loader).add("best", 0.0).add_random_state()
    assert state.resume() == resume
    if not resume:
        for _ in range(2):
            for p in net.parameters():
                p.grad = torch.full_like(p, 0.5)
            optimizer.step()
        next(iter(loader.epoch(1)))
        state["best"] = 0.75
        torch.manual_seed(11)
        state.save(5)
    own = optimizer.state[net.weight]
    found = {
        "weight": net.weight.flatten().tolist(),
        "bias": net.bias.tolist(),
        "exp_avg_sq": own["exp_avg_sq"].flatten().tolist(),
        "steps": [own["step"].item()],
        "lr": [optimizer.param_groups[0]["lr"]],
        "best": [state["best"]],
        "epoch": [loader.current_epoch],
        "samples_drawn": [loader.samples_drawn],
        "random": torch.rand(3).tolist(),
    }
    for name, numbers in found.items():
        print(name, *(f"{number:.9g}" for number in numbers))


@pytest.mark.parametrize("saver", ["c++", "python"])
def test_exchange_with_the_library(tmp_path, saver):
    """What one saves, the other resumes: weights, optimizer, loader, values, random numbers."""
    program = pathlib.Path(os.environ["LOCKSTEP_PROGRAM"]).parent / "python_state_exchange"
    own = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(pathlib.Path(__file__).parent)!r}]\n"
           "import test_checkpoint; test_checkpoint.state_of(sys.argv[2], sys.argv[1] == 'resume')"]  # fmt: skip
    said = [
        subprocess.run([*command, action, tmp_path / "state"], capture_output=True, text=True, timeout=120)
        for command, action in zip(([program], own) if saver == "c++" else (own, [program]), ("save", "resume"))
    ]
    assert said[0].returncode == 0 and said[1].returncode == 0, said
    assert said[0].stdout == said[1].stdout and "samples_drawn 2\n" in said[0].stdout


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("positions", torch.arange(8.0), persistent=False)

    def forward(self, x):
        if len(x) > len(self.positions):
            self.register_buffer("positions", torch.arange(float(len(x))), persistent=False)
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)
        return self.fc(x) * self.positions[: len(x), None].cos() * self.scale


@on_ranks(1, 2, 3)
def test_buffers_that_are_not_persistent_may_have_changed(world):
    folder = shared_folder(world)
    weights = []
    for resumed in (False, True):
        net = Cached()
        ddp = lockstep.DistributedDataParallel(net, world)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        state = TrainingState(world, folder).add("model", net).add("optimizer", optimizer, net).add("step", 0)
        assert state.resume() == resumed
        weights.append(net.fc.weight.detach().clone())
        for _ in range(4):
            state["step"] += 1
            optimizer.zero_grad()
            net(torch.ones(6 + 2 * state["step"] + 3 * world.rank, 4)).pow(2).mean().backward()
            optimizer.step()
        state.save(state["step"])
        weights.append(net.fc.weight.detach().clone())
        assert state["step"] == 4 + 4 * resumed and "positions" not in state.read("model") if resumed else True
        del state, ddp
    assert torch.equal(weights[1], weights[2])


@on_ranks(1)
def test_persistent_buffer_of_another_size_is_named(world):
    folder, net = shared_folder(world), nn.BatchNorm1d(2)
    TrainingState(world, folder).add("model", net).save(1)
    net.register_buffer("running_mean", torch.zeros(3))
    with pytest.raises(lockstep.UsageError, match='"running_mean" of "model" has another .* persistent=False'):
        TrainingState(world, folder).add("model", net).resume()
