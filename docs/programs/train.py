import torch

import lockstep

torch.manual_seed(0)
points = torch.randn(4096, 20)
dataset = torch.utils.data.TensorDataset(points, (points.sum(1) > 0).long())

world = lockstep.init()  # before the model, so that gradients are in shared memory
net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
ddp = lockstep.DistributedDataParallel(net, world)  # net stays what it is: no wrapper, no "module."
optimizer = lockstep.optim.AdamW(ddp, lr=1e-2)  # or torch.optim.AdamW(net.parameters(), lr=1e-2)
loader = lockstep.data.DataLoader(dataset, world, batch_size=64)  # this rank's part of the data
for epoch in range(3):
    for inputs, labels in loader.epoch(epoch):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(inputs), labels)
        loss.backward()
        optimizer.step()
    if world.rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
if world.rank == 0:
    torch.save(net.state_dict(), "net.pt")
