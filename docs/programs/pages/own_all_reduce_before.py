"""The program of docs/how-to/own-all-reduce.md before the change: a loop of its own over the gradients.

torchrun --nproc-per-node 2 own_all_reduce_before.py
"""

import torch

# docs: begin loop
import torch.distributed as dist

# docs: end loop

loss_function = torch.nn.functional.mse_loss
losses = []


def make_net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def batches(rank, num_steps=6):
    for step in range(num_steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        yield x, x.sum(1, keepdim=True).sin()


# docs: begin loop
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
net = make_net()
for p in net.parameters():
    dist.broadcast(p.data, 0)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

for x, y in batches(rank):
    optimizer.zero_grad()
    loss = loss_function(net(x), y)
    loss.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= size
    optimizer.step()
    # docs: end loop
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / size)


def train_alone():
    """The same in one process, with the batches of all ranks. Returns the losses."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for parts in zip(*(batches(rank) for rank in range(size)), strict=True):
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss = loss_function(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.testing.assert_close(torch.tensor(losses), torch.tensor(train_alone()))
dist.destroy_process_group()
