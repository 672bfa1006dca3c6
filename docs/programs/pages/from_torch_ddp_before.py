"""The old programs of docs/how-to/from-torch-ddp.md. from_torch_ddp.py imports this file and compares the losses."""

import functools

# docs: begin program
import os

# docs: end program
import tempfile

# docs: begin program
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

# docs: end program

# Both programs draw samples in the order of the dataset, so that their losses can be compared.
DistributedSampler = functools.partial(DistributedSampler, shuffle=False)


class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def make_dataset():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(80, 4, generator=generator)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


loss_function = torch.nn.functional.mse_loss
dataset, losses = make_dataset(), []
_folder = tempfile.TemporaryDirectory()
file = f"{_folder.name}/net.pt"
torch.manual_seed(1)

# docs: begin program
dist.init_process_group("gloo")
local_rank = int(os.environ["LOCAL_RANK"])
net = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_function(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
dist.barrier()
if dist.get_rank() == 0:
    torch.save(net.module.state_dict(), file)
dist.barrier()
# docs: end program

assert losses[-1] < losses[0]
assert local_rank == dist.get_rank()
prefixed_state = {name: value.clone() for name, value in net.state_dict().items()}

for i, (x, y) in enumerate(loader):
    if i % 2 == 0:
        with net.no_sync():
            loss_function(net(x), y).backward()
    else:
        loss_function(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

backend = dist.get_backend()
dist.destroy_process_group()
