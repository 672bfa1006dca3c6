"""lockstep.host_shared(): one memory per host, private writes, files, tied weights, optimizers."""

import os
import tempfile

import numpy
import pytest
import torch
from ranks import on_ranks
from safetensors.torch import save_file
from torch import nn

import lockstep


class Net(nn.Module):
    def __init__(self, width=64, device=None):
        super().__init__()
        self.first = nn.Linear(width, width, device=device)
        self.tied = self.first
        self.out = nn.Linear(width, 2, device=device).bfloat16()
        self.register_buffer("count", torch.ones(3, device=device))
        self.register_buffer("empty", torch.ones(0, device=device))

    def forward(self, x):
        return self.out(torch.relu(self.first(x)).bfloat16()).float()


@on_ranks(1, 2, 3)
def test_writes_are_private_and_counted(world):
    torch.manual_seed(world.rank)
    net = Net()
    before = net.first.weight
    shared = lockstep.host_shared(net, world)
    assert net.first.weight is before and net.tied.weight is before
    values = world.all_gather_object(net.first.weight.detach())
    assert all(torch.equal(one, values[0]) for one in values)
    assert shared.copied_bytes == 0 and shared.mapped_bytes >= shared.num_bytes > 64 * 64 * 4
    world.barrier()
    if world.rank == world.size - 1:
        with torch.no_grad():
            net.first.weight[0, 0] += 1
        assert shared.copied_bytes == 4096
    world.barrier()
    assert torch.equal(net.first.weight, values[0]) == (world.rank < world.size - 1)
    assert net.out.weight.dtype == torch.bfloat16 and net.count.tolist() == [1, 1, 1]


@on_ranks(2)
def test_file_is_read_once(world):
    """Into a module without memory; safetensors and torch's."""
    torch.manual_seed(7)
    expected = Net()
    with tempfile.TemporaryDirectory() as folder:
        paths = (f"{folder}/net.pt", f"{folder}/net.safetensors")
        torch.save(expected.state_dict(), paths[0])
        save_file({name: one.clone() for name, one in expected.state_dict().items()}, paths[1])
        for path in paths:
            net = Net(device="meta")
            lockstep.host_shared(net, world, path if world.rank == 0 else "/nowhere")
            assert net.tied.weight is net.first.weight and net.empty.shape == (0,) and not net.empty.is_meta
            for name, one in net.state_dict().items():
                assert torch.equal(one, expected.state_dict()[name]), name
        with pytest.raises(lockstep.UsageError, match='rank 0: the file has no "other.weight"'):
            wider = Net(device="meta")
            wider.other = nn.Linear(2, 2)
            lockstep.host_shared(wider, world, paths[0])
        with open(paths[1], "rb+") as file:
            damaged = Net(device="meta")
            file.truncate(200)
        with pytest.raises(lockstep.UsageError, match="rank 0: "):
            lockstep.host_shared(damaged, world, paths[1])
        save_file({name: one.clone() for name, one in expected.state_dict().items()}, paths[1])
        with pytest.raises(lockstep.UsageError, match="another shape or dtype"):
            lockstep.host_shared(Net(32, device="meta"), world, paths[1])
        with pytest.raises(lockstep.UsageError, match="there is no file"):
            lockstep.host_shared(Net(device="meta"), world)
        with pytest.raises(lockstep.UsageError, match="other parameters"):
            lockstep.host_shared(Net(32 if world.rank else 64), world)


@on_ranks(2)
def test_many_tensors_and_buffers_that_are_not_saved(world):
    """No descriptor per tensor; buffers that are not persistent come from the module."""
    net = nn.ModuleList(nn.Linear(2, 1) for _ in range(600))
    net[0].register_buffer("mask", torch.full((2,), 3.0), persistent=False)
    descriptors = len(os.listdir("/proc/self/fd"))
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save(net.state_dict(), file.name)
        lockstep.host_shared(net, world, file.name)
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2 and net[0].mask.tolist() == [3, 3]


def _memory():
    """The memory of this process in bytes: its own, and its part of what it shares. Mapped files do not count: other
    processes that map them change that part."""
    with open("/proc/self/smaps_rollup") as file:
        kilobytes = {line.split()[0]: line.split()[1] for line in file}
    return int(kilobytes["Pss_Anon:"]) * 1024, int(kilobytes["Pss_Shmem:"]) * 1024


@on_ranks(4)
def test_memory_of_fifty_million_parameters(world):
    """All ranks of a host together hold one copy, whatever the kind of the file."""
    for kind in ("pt", "safetensors"):
        net = nn.Sequential(*(nn.Linear(4096, 4096, device="meta") for _ in range(3)))
        num_bytes = sum(p.nbytes for p in net.parameters())
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/net.{kind}"
            if world.rank == 0:  # in numpy's memory, because freed tensors leave memory that host_shared() could use
                values = {
                    name: torch.from_numpy(numpy.full(p.shape, 0.5, numpy.float32))
                    for name, p in net.named_parameters()
                }
                torch.save(values, path) if kind == "pt" else save_file(values, path)
                del values
            world.barrier()
            own_before, shared_before = _memory()
            shared = lockstep.host_shared(net, world, path)
        assert all(p.sum().item() == p.numel() / 2 for p in net.parameters())
        world.barrier()
        own, in_shared = _memory()
        grown = sum(world.all_gather_object(in_shared - shared_before))
        grown_with_own = grown + sum(world.all_gather_object(own - own_before))
        assert num_bytes <= grown, f"{kind}: {grown} of {num_bytes}"
        assert max(grown, grown_with_own) < 1.05 * num_bytes and shared.copied_bytes == 0, f"{kind}: {grown_with_own}"
        del shared, net


@on_ranks(2, 3)
def test_training(world):
    """With an optimizer of torch at the price of copies; a fused one takes the memory over."""
    results = []
    for share in (False, True):
        for fused in (False, True):
            torch.manual_seed(3)
            net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
            shared = lockstep.host_shared(net, world) if share else None
            ddp = lockstep.DistributedDataParallel(net, world)
            optimizer = lockstep.optim.SGD(ddp, lr=0.1) if fused else torch.optim.SGD(net.parameters(), lr=0.1)
            for step in range(3):
                generator = torch.Generator().manual_seed(10 * step + world.rank)
                optimizer.zero_grad()
                net(torch.randn(8, 64, generator=generator)).square().mean().backward()
                optimizer.step()
            if shared:
                assert shared.mapped_bytes == 0 if fused else shared.copied_bytes > 0
            results.append(torch.cat([p.detach().reshape(-1).clone() for p in net.parameters()]))
            del optimizer, ddp
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
