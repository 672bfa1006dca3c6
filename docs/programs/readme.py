"""The Python programs of README.md and docs/guide/08-python.md, with a model and generated data."""

import os
import tempfile

import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)

    def forward(self, x):
        return torch.log_softmax(self.fc(x), 1)


def batches_of(rank, size, epoch):
    """Points in the plane, labelled by the side of a line on which they are; another part for each rank."""
    generator = torch.Generator().manual_seed(1000 * epoch + rank)
    for _ in range(40 // size):
        x = torch.rand(64, 2, generator=generator)
        yield x, (x[:, 0] > x[:, 1]).long()


loss_function = torch.nn.functional.nll_loss
torch.manual_seed(1)
_folder = tempfile.TemporaryDirectory()
os.chdir(_folder.name)

# docs: begin program
import lockstep  # noqa: E402

world = lockstep.init()  # before the first tensor, so that gradients are in shared memory
net = Net()  # stays what it is: no wrapper, no "module."
ddp = lockstep.DistributedDataParallel(net, world)  # copies rank 0's parameters; averages gradients from here on
optimizer = lockstep.optim.AdamW(ddp, lr=5e-2)  # or torch.optim.AdamW(net.parameters(), lr=5e-2)
for epoch in range(3):
    for x, y in batches_of(world.rank, world.size, epoch):
        optimizer.zero_grad()
        loss = loss_function(net(x), y)
        loss.backward()
        optimizer.step()
if world.rank == 0:
    torch.save(net.state_dict(), "net.pt")
# docs: end program

if world.rank == 0:
    assert sorted(torch.load("net.pt")) == ["fc.bias", "fc.weight"]
assert loss.item() < 0.65


def evaluate(model):
    with torch.no_grad():
        return sum(loss_function(model(x), y).item() for x, y in batches_of(0, 1, 99))


# docs: begin groups
loss_of_all = world.all_gather_object({"rank": world.rank, "loss": loss.item()})
with world.busy("evaluate"):  # others may wait longer for this rank
    evaluate(net)
# docs: end groups
assert [one["rank"] for one in loss_of_all] == list(range(world.size))
