"""Children made by fork() have the values of the moment of the fork, whatever the ranks write later."""

import contextlib
import io
import multiprocessing
import os
import pickle
import re
import threading

import torch
from process_group import process_group
from ranks import on_ranks
from torch import nn

import lockstep

SIZES = (1, 2, 3)
KINDS = ("torch", "fused", "backend")
MEBIBYTE = 1 << 20


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.small, self.large = nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Linear(8, 40_000)

    def forward(self, x):
        return self.large(torch.tanh(self.small(self.norm(x))))


class Training:
    def __init__(self, world, kind):
        torch.manual_seed(7)
        self.net = Net()
        if kind == "backend":
            self.model = nn.parallel.DistributedDataParallel(self.net)
        else:
            self.model = self.net
            self.ddp = lockstep.DistributedDataParallel(self.net, world)
        if kind == "fused":
            self.optimizer = lockstep.optim.AdamW(self.ddp, lr=0.1)
        else:
            self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)

    def steps(self):
        for _ in range(3):
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 6)).square().mean().backward()
            self.optimizer.step()

    def saved(self):
        """All values, as a saver in a child writes them."""
        file = io.BytesIO()
        gradients = [p.grad for p in self.net.parameters()]
        torch.save((self.net.state_dict(), gradients, self.optimizer.state_dict()), file)
        return file.getvalue()

    def evaluate(self):
        self.net.eval()
        with torch.no_grad():
            loss = self.net(torch.ones(5, 6)).square().mean().item()
        self.net.train()
        return loss


@contextlib.contextmanager
def training(world, kind):
    with process_group() if kind == "backend" else contextlib.nullcontext():
        made = Training(world, kind)
        made.steps()
        yield made
        world.barrier()


def in_child(read, meanwhile):
    """Returns what read() returns in a child that is forked now and calls it after meanwhile() has run here."""
    go, result = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go[1])
        with contextlib.suppress(BaseException), os.fdopen(result[1], "wb") as to:
            os.read(go[0], 1)
            pickle.dump(read(), to)
        os._exit(0)
    os.close(result[1])
    os.close(go[0])
    meanwhile()
    os.close(go[1])
    with os.fdopen(result[0], "rb") as source:
        value = pickle.load(source)
    assert os.waitpid(child, 0)[1] == 0
    return value


@on_ranks(*SIZES)
def test_evaluation_and_saver_in_a_child(world):
    for kind in KINDS:
        with training(world, kind) as made:
            saved, loss = made.saved(), made.evaluate()
            assert in_child(made.saved, made.steps) == saved, kind
            assert made.saved() != saved
            loss = made.evaluate()
            assert in_child(made.evaluate, made.steps) == loss, kind


@on_ranks(*SIZES)
def test_writes_of_a_child(world):
    """They reach neither the rank nor its children."""

    def overwrite():
        with torch.no_grad():
            for p in made.net.parameters():
                p.fill_(1)
        grandchild = in_child(lambda: made.net.large.bias.sum().item(), lambda: made.net.large.bias.data.fill_(2))
        return made.net.small.weight.sum().item(), grandchild, torch.ones(200_000).sum().item()

    for kind in KINDS:
        with training(world, kind) as made:
            saved = made.saved()
            assert in_child(overwrite, lambda: None) == (48, 40_000, 200_000), kind
            assert made.saved() == saved, kind


@on_ranks(*SIZES)
def test_fork_from_another_thread(world):
    for kind in KINDS:
        with training(world, kind) as made:
            saved, found, forked = made.saved(), [], threading.Event()
            written = threading.Event()

            def fork(made=made, found=found, forked=forked, written=written):
                found.append(in_child(made.saved, lambda: (forked.set(), written.wait())))

            thread = threading.Thread(target=fork)
            thread.start()
            forked.wait()
            made.steps()
            written.set()
            thread.join()
            assert found == [saved], kind


def shared_kilobytes(address):
    """How much of the mapping at this address other processes have as well."""
    kilobytes = 0
    with open("/proc/self/smaps") as file:
        is_wanted = False
        for line in file:
            if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                is_wanted = int(mapping[1], 16) <= address < int(mapping[2], 16)
            elif is_wanted and (shared := re.match(r"Shared_(?:Clean|Dirty): +(\d+)", line)):
                kilobytes += int(shared[1])
    return kilobytes


class Table(torch.utils.data.Dataset):
    def __init__(self):
        self.values = torch.ones(64 * MEBIBYTE // 4)
        self.num_samples = 4

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return self.values[-1].item(), shared_kilobytes(self.values[len(self.values) // 2 :].data_ptr())


@on_ranks(*SIZES)
def test_workers_of_a_loader(world):
    """They have the values of the beginning of the pass, and one copy of them."""
    for kind in KINDS:
        with training(world, kind):
            table = Table()
            loader = torch.utils.data.DataLoader(table, num_workers=2, batch_size=1, prefetch_factor=1)
            batches = iter(loader)
            table.values.fill_(2)
            found = list(batches)
            assert [value.item() for value, _ in found] == [1] * 4, kind
            if world.size > 1:  # a single rank has no shared memory
                # The last sample of each worker, when both are there.
                assert min(kilobytes.item() for _, kilobytes in found[-2:]) > 60 * 1024, kind


def sum_of(value):
    return (shared[0] + value).sum().item()


shared = []


@on_ranks(*SIZES)
def test_multiprocessing(world):
    for kind in KINDS:
        with training(world, kind):
            shared[:] = [torch.zeros(MEBIBYTE)]
            with multiprocessing.get_context("fork").Pool(2) as pool:
                shared[0].fill_(5)
                assert pool.map(sum_of, [1, 2, 3, 4]) == [value * MEBIBYTE for value in (1, 2, 3, 4)], kind


@on_ranks(2, 3)
def test_host_shared_model(world):
    net = Net()
    lockstep.host_shared(net, world)
    ddp = lockstep.DistributedDataParallel(net, world)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        net(torch.ones(2, 6) * (world.rank + torch.arange(2.0).view(2, 1))).square().mean().backward()
        optimizer.step()

    step()
    before = net.large.weight.sum().item()
    assert in_child(lambda: net.large.weight.sum().item(), step) == before
    assert net.large.weight.sum().item() != before
    world.barrier()
    del ddp
