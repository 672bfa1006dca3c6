"""The mean of the ranks' losses, for docs/how-to/troubleshooting.md."""

import torch

import lockstep

world = lockstep.init()
torch.manual_seed(1)
net = torch.nn.Linear(3, 1)
ddp = lockstep.DistributedDataParallel(net, world)
x = torch.rand(8, 3, generator=torch.Generator().manual_seed(world.rank))
loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
loss.backward()
# docs: begin mean
mean = loss.detach().clone()
world.all_reduce(mean, op="mean")
if world.rank == 0:
    print(f"loss {mean.item():.4f}")
# docs: end mean
ddp.compare_replicas()
losses = world.all_gather_object(loss.item())
assert len(set(losses)) == world.size
assert abs(mean.item() - sum(losses) / world.size) < 1e-6
