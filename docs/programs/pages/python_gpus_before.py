"""The setup of a script of torch.distributed in docs/how-to/python-gpus.md. Started by torchrun."""

import os

import torch
import torch.distributed as dist
from python_gpus_data import Net, check, dataset
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

# docs: begin setup
if torch.cuda.is_available():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
else:
    device = torch.device("cpu")
    dist.init_process_group("gloo")
net = DistributedDataParallel(Net().to(device))
# docs: end setup

optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
sampler = torch.utils.data.DistributedSampler(dataset, shuffle=False)
losses = []
for _ in range(2):
    for x, y in torch.utils.data.DataLoader(dataset, batch_size=16, sampler=sampler):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = functional.cross_entropy(net(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
means = torch.stack(losses)
dist.all_reduce(means)
size = dist.get_world_size()
check(means.cpu() / size, lambda _: torch.utils.data.DataLoader(dataset, batch_size=16 * size), device)
dist.destroy_process_group()
