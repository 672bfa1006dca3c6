"""The script for Horovod of docs/how-to/horovod.md, whose import alone has changed.

lockstep run -n 2 python from_horovod_before.py
"""

import torch  # noqa: I001
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

# docs: begin program
import lockstep.horovod as hvd

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
hvd.init()
dataset, net = make_dataset(), make_net()
sampler = DistributedSampler(dataset, hvd.size(), hvd.rank())
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
hvd.broadcast_parameters(net.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())

for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_function(net(x), y)
        loss.backward()
        optimizer.step()
    mean = hvd.allreduce(loss.detach(), name="loss")
    # docs: end program
    losses.append(mean.item())


def clip_and_step():
    """Returns the weights after a step with clipped gradients."""
    optimizer.zero_grad()
    x, y = dataset[hvd.rank() :: hvd.size()]
    loss_function(10 * net(x), y).backward()
    # docs: begin clip
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()
    # docs: end clip
    return net[0].weight.detach()


def scale_and_step():
    """Returns whether the step was made on this rank; the gradients of the last rank are infinite."""
    scaler = torch.amp.GradScaler("cpu")
    before = net[0].weight.detach().clone()
    optimizer.zero_grad()
    loss = loss_function(net(x), y)
    if hvd.rank() == hvd.size() - 1:
        loss = loss * float("inf")
    # docs: begin scaler
    scaler.scale(loss).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    # docs: end scaler
    return not torch.equal(before, net[0].weight)


assert losses[-1] < losses[0], losses
if __name__ == "__main__":
    assert hvd.allgather_object(scale_and_step()) == [False] * hvd.size()
