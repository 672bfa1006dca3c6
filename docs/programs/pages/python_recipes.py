"""The programs of docs/how-to/python-recipes.md, each beside one process with the whole batch."""

import contextlib
import copy
import os
import tempfile

import torch
from torch import nn
from torch.nn import functional
from torch.optim import swa_utils

import lockstep

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

world = lockstep.init()
_temporary = tempfile.TemporaryDirectory()
os.chdir(world.broadcast_object(_temporary.name, 0))
STEPS, SIZE = 8, 4


def make_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def part(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(SIZE, 4, generator=generator)
    return x, x[:, :3].argmax(1)


batches = [part(step, world.rank) for step in range(STEPS)]
whole = [
    [torch.cat(parts) for parts in zip(*[part(step, rank) for rank in range(world.size)], strict=True)]
    for step in range(STEPS)
]
loss_of = functional.cross_entropy


def train_alone(change=lambda net, optimizer: None, accumulate=1, loss_of=lambda net, x, y: loss_of(net(x), y)):
    """Returns a network that one process has trained. `change` is called before each step of the optimizer."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for step, (x, y) in enumerate(whole):
        (loss_of(net, x, y) / accumulate).backward()
        if (step + 1) % accumulate == 0:
            change(net, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return net


def check(net, expected, tolerance=1e-5):
    for one, other in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def accumulate(net, ddp, optimizer):
    # docs: begin accumulate
    for step, (x, y) in enumerate(batches):
        is_last = (step + 1) % 4 == 0
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            (loss_of(net(x), y) / 4).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    # docs: end accumulate


def clip(net, ddp, optimizer):
    for x, y in batches:
        # docs: begin clip
        optimizer.zero_grad()
        loss_of(net(x), y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        # docs: end clip


def bfloat16(net, ddp, optimizer):
    device = world.device
    for x, y in batches:
        # docs: begin bfloat16
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(net(x), y)
        loss.backward()
        optimizer.step()
        # docs: end bfloat16


def float16(net, ddp, optimizer):
    device = world.device
    # docs: begin float16
    scaler = torch.amp.GradScaler(device.type)
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            loss = loss_of(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # only for the clipping
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    # docs: end float16


def schedule(net, ddp, optimizer):
    # docs: begin schedule
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches) - 2)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], [2])
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(net(x), y).backward()
        optimizer.step()
        schedule.step()  # once per step, on every rank
    # docs: end schedule
    assert schedule.get_last_lr()[0] < 1e-6


def losses(net, ddp, optimizer):
    for x, y in batches:
        # docs: begin losses
        optimizer.zero_grad()
        output = net(x)
        loss = loss_of(output, y) + 0.1 * output.square().mean()
        loss.backward()
        optimizer.step()
        # docs: end losses


def backwards(net, ddp, optimizer):
    for x, y in batches:
        optimizer.zero_grad()
        output = net(x)
        with ddp.no_sync():
            loss_of(output, y).backward(retain_graph=True)
        (0.1 * output.square().mean()).backward()
        optimizer.step()


def clip_alone(net, optimizer):
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def both_losses(net, x, y):
    output = net(x)
    return loss_of(output, y) + 0.1 * output.square().mean()


CASES = {
    accumulate: (train_alone(accumulate=4), 1e-5),
    clip: (train_alone(clip_alone), 1e-5),
    bfloat16: (train_alone(), 0.05),
    float16: (train_alone(clip_alone), 0.02),
    losses: (train_alone(loss_of=both_losses), 1e-5),
    backwards: (train_alone(loss_of=both_losses), 1e-5),
    schedule: (None, 0),
}
for recipe, (expected, tolerance) in CASES.items():
    for fused in (True, False):
        net = make_net()
        ddp = lockstep.DistributedDataParallel(net, world)
        optimizer = lockstep.optim.SGD(ddp, 0.5) if fused else torch.optim.SGD(net.parameters(), 0.5)
        recipe(net, ddp, optimizer)
        if expected is not None:
            check(net, expected, tolerance)
        del ddp, optimizer

net = make_net()
ddp = lockstep.DistributedDataParallel(net, world)
# docs: begin freeze
net[0].requires_grad_(False)
optimizer = lockstep.optim.AdamW(ddp, lr=1e-2)
for step, (x, y) in enumerate(batches):
    if step == 4:
        net[0].requires_grad_(True)  # on all ranks in the same step
    optimizer.zero_grad()
    loss_of(net(x), y).backward()
    optimizer.step()
    # docs: end freeze
    assert torch.equal(net[0].weight, make_net()[0].weight) == (step < 4)
del ddp, optimizer

net = make_net()
ddp = lockstep.DistributedDataParallel(net, world)
optimizer = lockstep.optim.SGD(ddp, lr=0.5)
expected = copy.deepcopy(net)
# docs: begin average
average = swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
for x, y in batches:
    optimizer.zero_grad()
    loss_of(net(x), y).backward()
    optimizer.step()
    average.update_parameters(net)
    # docs: end average
    if average.n_averaged == 1:
        expected.load_state_dict(net.state_dict())
    for one, other in zip(expected.parameters(), net.parameters(), strict=True):
        one.data.lerp_(other.data, 0.1)
check(average.module, expected)

dataset = [(x, y) for xs, ys in (part(step, 0) for step in range(5)) for x, y in zip(xs, ys, strict=True)][:19]


# docs: begin evaluate
@torch.no_grad()
def accuracy_of(net, dataset):
    loader = lockstep.data.DataLoader(dataset, world, batch_size=8, shuffle=False, mode="exact")
    sums = torch.zeros(2, dtype=torch.float64)
    for x, y in loader.epoch(0):
        sums[0] += net(x).argmax(1).eq(y).sum()
        sums[1] += len(y)
    world.all_reduce(sums)
    assert sums[1] == len(dataset)
    return (sums[0] / sums[1]).item()
    # docs: end evaluate


x, y = (torch.stack(column) for column in zip(*dataset, strict=True))
assert accuracy_of(net, dataset) == net(x).argmax(1).eq(y).double().mean().item()

num_epochs, best = 2, -1.0
for _ in range(num_epochs):
    # docs: begin best
    accuracy = accuracy_of(net, dataset)  # the same on all ranks
    if accuracy > best:
        best = accuracy
        if world.rank == 0:
            torch.save(net.state_dict(), "best.pt")
    # docs: end best
world.barrier()
net.load_state_dict(torch.load("best.pt"))

if tqdm is not None:
    loader = lockstep.data.DataLoader(dataset, world, batch_size=4)
    epoch = 0
    # docs: begin tqdm
    bar = tqdm(loader.epoch(epoch), total=len(loader), disable=world.rank != 0)
    for x, y in bar:
        optimizer.zero_grad()
        loss = loss_of(net(x), y)
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    # docs: end tqdm


class SummaryWriter:
    """Stands for that of torch.utils.tensorboard."""

    def __init__(self, folder):
        os.makedirs(folder)
        self.file = open(f"{folder}/scalars", "w")

    def add_scalar(self, name, value, step):
        self.file.write(f"{step} {name} {value}\n")


# docs: begin logger
writer = SummaryWriter("runs/digits") if world.rank == 0 else None
for step, (x, y) in enumerate(batches):
    optimizer.zero_grad()
    loss = loss_of(net(x), y)
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        mean = loss.detach().clone()
        world.all_reduce(mean, "mean")  # on all ranks
        if writer:
            writer.add_scalar("train/loss", mean.item(), step)
# docs: end logger
if writer:
    writer.file.close()
    with open("runs/digits/scalars") as file:
        assert len(file.readlines()) == 2
world.barrier()  # rank 0 removes the folder
