"""Measures what docs/how-to/batch-size.md shows: trainings with 1, 2 and 4 of the ranks, other batches and rates.

  lockstep run -n 4 python batch_size.py --data FOLDER     # with t10k-images-idx3-ubyte.gz, ... of MNIST

Without --data, trains briefly on generated images and checks what must be equal.
"""

import argparse
import pathlib
import sys
import time

import torch
from torch import nn
from torch.nn import functional

import lockstep

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "examples/python"))
import mnist  # noqa: E402

BATCH, RATE = 32, 0.02


class Images(torch.utils.data.Dataset):
    """Images, float32 [1, 28, 28] from 0 to 1, and their digits, as whole batches."""

    def __init__(self, images, digits):
        self.images, self.digits = images.unsqueeze(1).float() / 255, digits.long()

    def __len__(self):
        return len(self.digits)

    def __getitems__(self, indices):
        return self.images[indices], self.digits[indices]


def generated_images(count, seed):
    """Returns images that consist of a pattern for each digit and noise."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(256, (10, 28, 28), generator=torch.Generator().manual_seed(0))
    digits = torch.randint(10, (count,), generator=generator)
    noise = torch.randint(256, (count, 28, 28), generator=generator)
    return Images((patterns[digits] + 2 * noise) // 3, digits)


def make_net(seed, batch_norm):
    torch.manual_seed(seed)
    norm = [nn.BatchNorm1d(64)] if batch_norm else []
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), *norm, nn.ReLU(), nn.Linear(64, 10))


def train(group, images, epochs, seed, batch, rate, warm_up=False, batch_norm=""):
    """Returns the mean loss of the last epoch, and the trained network. `batch` is that of one rank."""
    # docs: begin batch_norm
    net = make_net(seed, batch_norm)
    if batch_norm == "all ranks":
        net = lockstep.nn.convert_sync_batch_norm(net, group)
    ddp = lockstep.DistributedDataParallel(net, group)
    # docs: end batch_norm
    loader = lockstep.data.DataLoader(
        images, group, batch_size=batch, seed=seed, drop_last=True, collate_fn=lambda whole: whole
    )
    # docs: begin warm_up
    optimizer = torch.optim.SGD(net.parameters(), rate, momentum=0.9)
    if warm_up:  # from a tenth of the rate to the rate, in the first tenth of the steps
        steps = epochs * len(loader) // 10
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=steps)
    # docs: end warm_up
    for epoch in range(epochs):
        losses = []
        for x, y in loader.epoch(epoch):
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            if warm_up:
                schedule.step()
            losses.append(loss.detach())
    mean = torch.stack(losses).mean()
    group.all_reduce(mean, "mean")
    del ddp
    return mean.item(), net


def train_with_scaled_rate(world, images):
    num_epochs = 2
    net = make_net(1, batch_norm=False)
    # docs: begin scaled
    batch, rate = 32, 0.02  # what is good on one rank
    ddp = lockstep.DistributedDataParallel(net, world)
    loader = lockstep.data.DataLoader(images, world, batch_size=batch)  # a step uses 32 * world.size images
    optimizer = torch.optim.SGD(net.parameters(), rate * world.size, momentum=0.9)
    warm_up = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1 / world.size, total_iters=num_epochs * len(loader) // 10
    )
    for epoch in range(num_epochs):
        for x, y in loader.epoch(epoch):
            optimizer.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            warm_up.step()
    # docs: end scaled
    assert abs(optimizer.param_groups[0]["lr"] - rate * world.size) < 1e-9
    del ddp


@torch.no_grad()
def accuracy(net, images):
    net.eval()
    return net(images.images).argmax(1).eq(images.digits).double().mean().item()


class Table:
    """Trains each row with every seed, and prints the means, and the smallest and largest accuracy."""

    def __init__(self, world, groups, train_images, test_images, epochs, seeds):
        self.world, self.groups, self.epochs, self.seeds = world, groups, epochs, seeds
        self.train_images, self.test_images = train_images, test_images

    def row(self, what, ranks, batch, rate, **options):
        """Returns the loss with the first seed; on ranks that do not take part, 0."""
        if self.world.rank >= ranks:
            return 0.0
        losses, scores = [], []
        for seed in range(1, 1 + self.seeds):
            mean, net = train(self.groups[ranks], self.train_images, self.epochs, seed, batch, rate, **options)
            losses.append(mean)
            scores.append(100 * accuracy(net, self.test_images))
        if self.world.rank == 0:
            steps = self.epochs * (len(self.train_images) // (ranks * batch))
            mean = sum(scores) / len(scores)
            print(
                f"| {what} | {ranks} | {batch} | {ranks * batch} | {rate:g} | {steps} "
                f"| {sum(losses) / len(losses):.4f} | {mean:.1f} ({min(scores):.1f} to {max(scores):.1f}) |",
                flush=True,
            )
        return losses[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="directory with the files of MNIST")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    world = lockstep.init()
    sizes = [size for size in (1, 2, 4) if size <= world.size]
    groups = {size: world.split(0 if world.rank < size else 1) for size in sizes}
    if args.data:
        images = [Images(part.images, part.digits) for part in mnist.load_images(args.data)]
    else:
        images, args.epochs, args.seeds = (generated_images(640, 1), generated_images(200, 2)), 1, 1
        train_with_scaled_rate(world, [(x, y) for x, y in zip(images[0].images, images[0].digits, strict=True)])
    table = Table(world, groups, *images, args.epochs, args.seeds)

    alone = table.row("one rank", 1, BATCH, RATE)
    for size in sizes[1:]:
        table.row("same batch per rank, same rate", size, BATCH, RATE)
        table.row("same batch per rank, rate x N", size, BATCH, size * RATE)
        table.row("the same, with warm-up", size, BATCH, size * RATE, warm_up=True)
        same = table.row("same global batch", size, BATCH // size, RATE)
        assert world.rank > 0 or abs(same - alone) < 2e-3, (same, alone)
    size, table.epochs = sizes[-1], 1
    alone = table.row("one rank", 1, 4 * size, RATE / 2, batch_norm="own")
    table.row("batch norm of each rank", size, 4, RATE / 2, batch_norm="own")
    same = table.row("batch norm of all ranks", size, 4, RATE / 2, batch_norm="all ranks")
    assert world.rank > 0 or abs(same - alone) < 2e-3, (same, alone)
    seconds = torch.tensor(time.process_time())
    world.all_reduce(seconds)
    if world.rank == 0:
        print(f"{seconds.item():.0f} CPU seconds", flush=True)


if __name__ == "__main__":
    main()
