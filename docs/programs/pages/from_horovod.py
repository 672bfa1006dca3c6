"""The program of docs/how-to/horovod.md with Lockstep's own interface. It compares its losses with those of
from_horovod_before.py.

lockstep run -n 2 python from_horovod.py
"""

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

# docs: begin program
import lockstep

# docs: end program

loss_function = torch.nn.functional.cross_entropy
losses = []


def make_dataset():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(96, 4, generator=generator)
    return TensorDataset(x, (x[:, 0] > x[:, 1]).long())


def make_net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


# docs: begin program
world = lockstep.init()
dataset, net = make_dataset(), make_net()
sampler = DistributedSampler(dataset, world.size, world.rank)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
ddp = lockstep.DistributedDataParallel(net, world)
optimizer = lockstep.optim.SGD(ddp, lr=0.1, momentum=0.9)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_function(net(x), y)
        loss.backward()
        optimizer.step()
    mean = loss.detach().clone()
    world.all_reduce(mean, "mean", name="loss")
    # docs: end program
    losses.append(mean.item())


def clip_and_step():
    """Returns the weights after a step with clipped gradients."""
    optimizer.zero_grad()
    x, y = dataset[world.rank :: world.size]
    loss_function(10 * net(x), y).backward()
    # docs: begin clip
    optimizer.clip_grad_norm(0.1)
    optimizer.step()
    # docs: end clip
    return net[0].weight.detach()


import from_horovod_before as before  # noqa: E402  # it trains with the world that exists

torch.testing.assert_close(torch.tensor(losses), torch.tensor(before.losses), rtol=1e-5, atol=1e-5)
torch.testing.assert_close(clip_and_step(), before.clip_and_step(), rtol=1e-4, atol=1e-5)
