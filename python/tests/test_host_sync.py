"""Less traffic between hosts for torch's DistributedDataParallel. The hosts are those that a variable names; on real
ones tests/procs/hosts/torch_backend.py counts the bytes."""

import copy
import tempfile

import pytest
import torch
import torch.distributed as dist
from process_group import process_group
from ranks import on_ranks
from torch import nn

import lockstep

EVERY, STEPS = 3, 8


def make_net():
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16, momentum=None), nn.Linear(16, 3))
    net[1].eval()  # DistributedDataParallel leaves its mode
    return net


def inputs_of(rank, step):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def hosts_of(size):
    return [[0, 1], list(range(2, size))]


def reference(size):
    """The weights of a training in which each host has its own copy, and all are averaged before some steps."""
    nets = [make_net() for _ in hosts_of(size)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]

    def average():
        with torch.no_grad():
            for parts in zip(*(net.parameters() for net in nets), strict=True):
                shares = [len(ranks) / size for ranks in hosts_of(size)]
                mean = sum(part * share for part, share in zip(parts, shares, strict=True))
                for part in parts:
                    part.copy_(mean)

    for step in range(STEPS):
        if step % EVERY == 0:
            average()
        for net, optimizer, ranks in zip(nets, optimizers, hosts_of(size), strict=True):
            optimizer.zero_grad()
            for rank in ranks:
                (net(inputs_of(rank, step)).square().mean() / len(ranks)).backward()
            optimizer.step()
    before = [copy.deepcopy(net) for net in nets]
    average()
    return before, nets[0]


def train(rank, net, steps=STEPS):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        net(inputs_of(rank, step)).square().mean().backward()
        optimizer.step()


def with_each_backend(world, test):
    """Calls test(backend, rank, size) within a default group of each backend, on two hosts. Each has a store of its
    own: that of env:// may still have the keys of the group before."""
    for backend in ("gloo", "lockstep"):
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
            store = "file://" + world.broadcast_object(folder, 0) + "/store"
            dist.init_process_group(backend, init_method=store, rank=world.rank, world_size=world.size)
            try:
                monkeypatch.setattr("lockstep._C.host_id", lambda: str(int(world.rank > 1)))
                test(backend, world.rank, world.size)
            finally:
                dist.destroy_process_group()
                world.barrier()  # before rank 0 removes the store


def distance(net, other):
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return max((one - two).abs().max().item() for one, two in pairs)


def check_training(backend, rank, size):
    before, after = reference(size)
    net = make_net()
    ddp = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
    hosts = lockstep.HostSync(ddp, every=EVERY)
    train(rank, ddp)
    assert distance(net, before[int(rank > 1)]) < 1e-5, backend
    net[1].running_mean.fill_(rank)
    net[1].running_var = torch.full_like(net[1].running_var, rank)  # a module may replace its buffers
    hosts.sync()
    assert distance(net, after) < 1e-5, backend
    for buffer in (net[1].running_mean, net[1].running_var):
        assert torch.allclose(buffer, torch.tensor((size - 1) / 2)), backend
    check_equal(net)


def check_rounding(backend, rank, size):
    _, after = reference(size)
    net = make_net()
    ddp = nn.parallel.DistributedDataParallel(net)
    hosts = lockstep.HostSync(ddp, every=EVERY, wire_dtype=torch.bfloat16)
    train(rank, ddp)
    hosts.sync()
    assert distance(net, after) < 2e-2, backend
    if backend == "gloo":  # lockstep knows that this is one host
        assert distance(net, after) > 1e-5
    check_equal(net)


def check_equal(net):
    """All ranks have the same bits."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, [one.tolist() for one in net.parameters()])
    assert all(one == found[0] for one in found)


@on_ranks(3, 4)
def test_parameters_are_averaged_every_few_steps(world):
    with_each_backend(world, check_training)


@on_ranks(4)
def test_what_is_sent_is_rounded(world):
    with_each_backend(world, check_rounding)


@on_ranks(2)
def test_gradients_between_hosts(world):
    with process_group() as (rank, _):
        nets = [make_net(), make_net()]
        ddps = [nn.parallel.DistributedDataParallel(net) for net in nets]
        lockstep.HostSync(ddps[0], wire_dtype=torch.bfloat16)
        for ddp in ddps:
            train(rank, ddp)
        assert distance(*nets) < 1e-6, "within a host nothing is rounded"


@on_ranks(1)
def test_wrong_arguments(world):
    dist.init_process_group("gloo")
    try:
        ddp = nn.parallel.DistributedDataParallel(make_net())
        for words, options in (
            ("expected an integer of at least 1", {"every": 0}),
            ("expected float32, bfloat16 or float16", {"wire_dtype": torch.int8}),
            ("changes nothing", {}),
            ('needs the backend "lockstep"', {"wire_dtype": torch.bfloat16}),
        ):
            with pytest.raises(lockstep.UsageError, match=words):
                lockstep.HostSync(ddp, **options)
        with pytest.raises(lockstep.UsageError, match="average_hosts_every"):
            lockstep.HostSync(make_net(), every=2)
    finally:
        dist.destroy_process_group()
