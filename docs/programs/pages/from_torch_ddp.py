"""The programs of docs/how-to/from-torch-ddp.md, beside the old ones, which run first in the same ranks."""

import functools
import tempfile

import from_torch_ddp_before as before
import torch
from from_torch_ddp_before import Net, dataset, loss_function

# docs: begin program
import lockstep

# docs: end program
losses = []
_folder = tempfile.TemporaryDirectory()
file = f"{_folder.name}/net.pt"
torch.manual_seed(1)

# Both programs draw samples in the order of the dataset, so that their losses can be compared.
lockstep.data.DataLoader = functools.partial(lockstep.data.DataLoader, shuffle=False)
# docs: begin program
world = lockstep.init()  # before the first tensor
net = Net()  # on GPUs: Net().to(world.device)
ddp = lockstep.DistributedDataParallel(net, world)
optimizer = lockstep.optim.AdamW(ddp, lr=1e-2)
loader = lockstep.data.DataLoader(dataset, world, batch_size=8)
for epoch in range(3):
    for x, y in loader.epoch(epoch):
        optimizer.zero_grad()
        loss = loss_function(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
if world.rank == 0:
    torch.save(net.state_dict(), file)
# docs: end program


def check(old, new, what):
    assert torch.allclose(torch.tensor(old), torch.tensor(new), rtol=1e-4), f"{what}: {old} before, {new} now"


check(before.losses, losses, "losses")

# docs: begin accumulate
for i, (x, y) in enumerate(loader):
    loss_function(net(x), y).backward()
    if i % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()
# docs: end accumulate


def mean_of(state):
    return [value.mean().item() for value in state.values()]


check(mean_of(before.net.module.state_dict()), mean_of(net.state_dict()), "weights after accumulation")
torch.save(before.prefixed_state, file)  # with the prefix

# docs: begin prefix
state = torch.load(file)
torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
net.load_state_dict(state)
# docs: end prefix


def loop():
    for x, y in own_batches:  # their number differs between ranks
        optimizer.zero_grad()
        loss_function(net(x), y).backward()
        optimizer.step()


own_batches = [dataset[:8]] * (1 + world.rank)
lockstep.join(ddp, loop)
everyone = world.all_gather_object(net[0].weight.detach())
assert all(torch.equal(one, everyone[0]) for one in everyone)

net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
lockstep.nn.convert_sync_batch_norm(net, world)
ddp = lockstep.DistributedDataParallel(net, world)
loss_function(net(x), y).backward()
