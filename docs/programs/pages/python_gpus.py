"""The program of docs/how-to/python-gpus.md. Runs on GPUs and on CPUs."""

import torch
from python_gpus_data import Net, check, dataset
from torch.nn import functional

import lockstep

# docs: begin program
# docs: begin setup
world = lockstep.init()
device = world.device  # cuda:0, cuda:1, ... or cpu
net = Net().to(device)
ddp = lockstep.DistributedDataParallel(net, world)
# docs: end setup
optimizer = lockstep.optim.AdamW(ddp, lr=1e-2)
on_gpu = device.type == "cuda"
loader = lockstep.data.DataLoader(dataset, world, batch_size=16, num_workers=2, pin_memory=on_gpu)
losses = []
for epoch in range(2):
    for x, y in loader.epoch(epoch):
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # loss.item() would wait for the GPU
# docs: end program

means = torch.stack(losses)
world.all_reduce(means, "mean")
check(means.cpu(), lockstep.data.DataLoader(dataset, batch_size=16 * world.size).epoch, device)
