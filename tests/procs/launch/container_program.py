"""A rank in a container.

Usage: container_program.py WHAT
train: a few steps with the package. loader: the same with a DataLoader whose batches have 64 MiB. gloo: a sum with
torch.distributed. tempfile: a temporary file. save: a file in the working directory. stuck: the last rank makes no
step. orphan: each rank leaves a process behind whose parent has ended, and waits."""

import subprocess
import sys
import tempfile
import time

import torch

import lockstep

WHAT = sys.argv[1]


class Large(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((1 << 20,), float(index))


def train(world, batches):
    net = torch.nn.Linear(4, 1)
    ddp = lockstep.DistributedDataParallel(net, world)
    optimizer = lockstep.optim.SGD(ddp, lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        net(batch.view(-1, 4)).square().mean().backward()
        optimizer.step()
    return float(net.weight.sum())


if WHAT == "gloo":
    torch.distributed.init_process_group("gloo")
    ones = torch.ones(2)
    torch.distributed.all_reduce(ones)
    print(f"sum {ones[0].item():.0f}", flush=True)
elif WHAT == "tempfile":
    tempfile.TemporaryFile()
elif WHAT == "save":
    torch.save({}, "net.pt")
elif WHAT == "orphan":
    lockstep.init().barrier()
    subprocess.run(["sh", "-c", "sleep 1 & sleep 1 &"], check=True)
    print("waits", flush=True)
    time.sleep(60)
else:
    world = lockstep.init()
    if WHAT == "stuck" and world.rank == world.size - 1:
        time.sleep(60)
    batches = torch.ones(3, 8, 4) * (world.rank + 1)
    if WHAT == "loader":
        batches = torch.utils.data.DataLoader(Large(), batch_size=16, num_workers=2)
    print(f"trained {train(world, batches):.4f} over {world.transport}", flush=True)
