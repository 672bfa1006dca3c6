"""The training of docs/how-to/debugging.md, which stops in a debugger on rank 0 at step 3."""

import torch

import lockstep

world = lockstep.init()
torch.manual_seed(1)
net = torch.nn.Linear(2, 1)
ddp = lockstep.DistributedDataParallel(net, world)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(5):
    x = torch.rand(8, 2, generator=torch.Generator().manual_seed(10 * step + world.rank))
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    # docs: begin breakpoint
    if world.rank == 0 and step == 3:
        breakpoint()
    # docs: end breakpoint
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    # docs: begin print
    if world.rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
    # docs: end print
