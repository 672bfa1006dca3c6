"""The programs of docs/how-to/several-models.md."""

import copy
import os
import tempfile

import torch
from several_models_data import STEPS, batches_of, bce, losses_alone, make_models
from torch import nn
from torch.nn import functional

import lockstep
from lockstep.optim import Adam

world = lockstep.init()


def check_equal(*modules):
    """All ranks have the same parameters."""
    mine = [parameter.detach() for module in modules for parameter in module.parameters()]
    for other in world.all_gather_object(mine):
        assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))


generator, discriminator = make_models()
losses = []
# docs: begin gan
ddp_g = lockstep.DistributedDataParallel(generator, world)
ddp_d = lockstep.DistributedDataParallel(discriminator, world)
optimizer_g = Adam(ddp_g, lr=1e-2)
optimizer_d = Adam(ddp_d, lr=1e-2)

for real, noise in batches_of(world.rank):
    fake = generator(noise)
    optimizer_d.zero_grad()
    loss_d = bce(discriminator(real), 1.0)
    loss_d = loss_d + bce(discriminator(fake.detach()), 0.0)
    loss_d.backward()
    optimizer_d.step()

    discriminator.requires_grad_(False)
    optimizer_g.zero_grad()
    loss_g = bce(discriminator(fake), 1.0)
    loss_g.backward()
    optimizer_g.step()
    discriminator.requires_grad_(True)
    # docs: end gan
    losses.append((loss_d.item(), loss_g.item()))

if world.rank == 0:
    torch.testing.assert_close(torch.tensor(losses), losses_alone(world.size), rtol=1e-3, atol=1e-4)
if world.size > 1:
    assert ddp_g.stats()["reductions"] == ddp_d.stats()["reductions"] == STEPS
check_equal(generator, discriminator)


def penalty_of(real, fake):
    # docs: begin penalty
    mix = torch.lerp(real, fake.detach(), 0.5).requires_grad_()
    (slope,) = torch.autograd.grad(discriminator(mix).sum(), mix, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    # docs: end penalty
    return penalty


for real, noise in batches_of(world.rank):
    optimizer_d.zero_grad()
    fake = generator(noise)
    loss = discriminator(fake.detach()).mean() - discriminator(real).mean() + 10 * penalty_of(real, fake)
    loss.backward()
    optimizer_d.step()
check_equal(discriminator)
del ddp_g, ddp_d, optimizer_g, optimizer_d

generator, discriminator = make_models()
# docs: begin one
both = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
ddp = lockstep.DistributedDataParallel(both, world)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-2)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-2)
# docs: end one
losses = []
for real, noise in batches_of(world.rank):
    fake = generator(noise)
    optimizer_d.zero_grad()
    loss_d = bce(discriminator(real), 1.0) + bce(discriminator(fake.detach()), 0.0)
    loss_d.backward()
    optimizer_d.step()
    optimizer_g.zero_grad()
    loss_g = bce(discriminator(fake), 1.0)
    loss_g.backward()
    optimizer_g.step()
    losses.append((loss_d.item(), loss_g.item()))
if world.rank == 0:
    torch.testing.assert_close(torch.tensor(losses), losses_alone(world.size), rtol=1e-3, atol=1e-4)
check_equal(generator, discriminator)
del ddp


def make_net():
    return nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


_temporary = tempfile.TemporaryDirectory()
folder = world.broadcast_object(_temporary.name, 0)
file = os.path.join(folder, "teacher.pt")
if world.rank == 0:
    torch.save(make_net().state_dict(), file)
world.barrier()
# docs: begin teacher
teacher = make_net()
teacher.load_state_dict(torch.load(file))  # on every rank
teacher.eval().requires_grad_(False)
student = make_net()
ddp = lockstep.DistributedDataParallel(student, world)
optimizer = Adam(ddp, lr=1e-2)
for x, _ in batches_of(world.rank):
    optimizer.zero_grad()
    with torch.no_grad():
        target = teacher(x).softmax(1)
    functional.cross_entropy(student(x), target).backward()
    optimizer.step()
# docs: end teacher
check_equal(teacher, student)

# docs: begin average
teacher = copy.deepcopy(student).requires_grad_(False)  # after the DistributedDataParallel
for x, _ in batches_of(world.rank):
    optimizer.zero_grad()
    with torch.no_grad():
        target = teacher(x).softmax(1)
    functional.cross_entropy(student(x + 0.1 * torch.randn_like(x)), target).backward()
    optimizer.step()
    with torch.no_grad():
        for average, new in zip(teacher.parameters(), student.parameters(), strict=True):
            average.lerp_(new, 0.01)
# docs: end average
check_equal(teacher, student)
assert not torch.equal(teacher[0].weight, student[0].weight)
del ddp, optimizer


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(2, 16)
        self.heads = nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 1)])


# docs: begin encoder
net = TwoTasks()
ddp = lockstep.DistributedDataParallel(net, world)
optimizer = Adam(ddp, lr=1e-2)
for step, (x, _) in enumerate(batches_of(world.rank)):
    head = net.heads[step % 2]  # the other one has no gradient in this step
    optimizer.zero_grad()
    head(torch.relu(net.encoder(x))).square().mean().backward()
    optimizer.step()
# docs: end encoder
check_equal(net)
del ddp, optimizer

encoder, first, second = nn.Linear(2, 8), nn.Linear(8, 1), nn.Linear(8, 1)
one, two = nn.Sequential(encoder, first), nn.Sequential(encoder, second)
ddp_one = lockstep.DistributedDataParallel(one, world)
ddp_two = lockstep.DistributedDataParallel(two, world, ignore=["0.weight", "0.bias"])
optimizer = torch.optim.SGD([*one.parameters(), *second.parameters()], lr=0.1)
for step, (x, _) in enumerate(batches_of(world.rank)):
    optimizer.zero_grad()
    (one, two)[step % 2](x).square().mean().backward()
    optimizer.step()
check_equal(one, two)
del ddp_two
ddp_two = lockstep.DistributedDataParallel(two, world)
if world.size > 1:
    try:
        one(torch.ones(1, 2)).sum().backward()
        raise AssertionError("no error")
    except lockstep.UsageError as error:
        assert "belongs to two DistributedDataParallel objects" in str(error), error
world.barrier()  # rank 0 removes the folder
