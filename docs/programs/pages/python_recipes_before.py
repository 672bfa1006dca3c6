"""An evaluation that counts samples twice, in docs/how-to/python-recipes.md. Started by torchrun."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
dataset = [(torch.tensor([float(i > 8)]), i % 2) for i in range(19)]


def net(x):
    return torch.cat([1 - x, x], 1)


# docs: begin evaluate
@torch.no_grad()
def accuracy_of(net, dataset):
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    hits = torch.zeros(())
    count = torch.zeros(())
    for x, y in loader:
        hits += net(x).argmax(1).eq(y).sum()
        count += len(y)
    dist.all_reduce(hits)
    dist.all_reduce(count)
    return (hits / count).item(), count.item()
    # docs: end evaluate


accuracy, count = accuracy_of(net, dataset)
x, y = (torch.as_tensor(column) for column in zip(*[(x.item(), y) for x, y in dataset], strict=True))
exact = net(x[:, None]).argmax(1).eq(y).float().mean().item()
size = dist.get_world_size()
assert count == -(-19 // size) * size
assert (accuracy == exact) == (19 % size == 0), (accuracy, exact)
dist.destroy_process_group()
