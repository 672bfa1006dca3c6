"""Trains a small convolutional network on handwritten digits: the Python form of examples/02_mnist, with the same
results.

DistributedDataParallel with an optimizer of torch, in a handwritten loop, and an evaluation that all ranks share.
--batch-size is the total over all ranks, so the result does not depend on the number of ranks.

  lockstep run -n 2 python mnist.py --data FOLDER     # with train-images-idx3-ubyte.gz, ... of MNIST
"""

import argparse
import gzip
import math
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

import lockstep


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="directory with the MNIST files, compressed (.gz) or not")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.05, help="maximum learning rate")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the initial weights and of the order of the images"
    )
    parser.add_argument("--weights", help="start with the weights in this file (safetensors)")
    parser.add_argument("--save", help="write the trained network to this file (safetensors)")
    parser.add_argument("--loss-log", help="write the mean loss of each step to this file, one per line")
    return parser.parse_args()


def read_idx(file):
    """Returns the bytes of a file of the MNIST database as a tensor, uint8."""
    opened = gzip.open(file) if file.suffix == ".gz" else file.open("rb")
    with opened as stream:
        magic = stream.read(4)
        shape = [int.from_bytes(stream.read(4), "big") for _ in range(magic[3])]
        return torch.frombuffer(bytearray(stream.read(math.prod(shape))), dtype=torch.uint8).view(shape)


class Images(torch.utils.data.Dataset):
    """Images, float32 [1, 28, 28] from 0 to 1, and their digits."""

    def __init__(self, images, digits):
        self.images, self.digits = images, digits

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        return self.images[index].unsqueeze(0).float() / 255, self.digits[index].long()


def load_images(folder):
    """Returns the training images, and the test images for validation. If `folder` has only the test images, trains on
    nine tenths of them."""

    def read(part):
        names = (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
        files = [file for name in names for file in sorted(pathlib.Path(folder).glob(name + "*"))[:1]]
        return Images(*map(read_idx, files)) if len(files) == 2 else None

    train, test = read("train"), read("t10k")
    if test is None:
        sys.exit(f'mnist.py: --data is "{folder}", which has no t10k-images-idx3-ubyte')
    if train is not None:
        return train, test
    count = len(test) - max(1, len(test) // 10)
    return Images(test.images[:count], test.digits[:count]), Images(test.images[count:], test.digits[count:])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = nn.Linear(32 * 7 * 7, 128)
        self.digits = nn.Linear(128, 10)

    def forward(self, x):
        x = (x - 0.1307) / 0.3081
        x = functional.avg_pool2d(functional.gelu(self.conv1(x)), 2)
        x = functional.avg_pool2d(functional.gelu(self.conv2(x)), 2)
        return functional.log_softmax(self.digits(functional.gelu(self.hidden(x.flatten(1)))), 1)


@torch.no_grad()
def evaluate(net, images, world):
    """Returns the mean loss and the accuracy over all images. Each image is evaluated by one rank. Collective."""
    loader = lockstep.data.DataLoader(images, world, batch_size=250, shuffle=False, mode="exact")
    sums = torch.zeros(2, dtype=torch.float64)
    for x, y in loader.epoch(0):
        output = net(x)
        sums[0] += functional.nll_loss(output, y, reduction="sum")
        sums[1] += output.argmax(1).eq(y).sum()
    world.all_reduce(sums)
    return (sums / len(images)).tolist()


def main():
    args = parse_arguments()
    world = lockstep.init()
    if args.batch_size % world.size != 0:
        sys.exit(
            f'mnist.py: --batch-size is "{args.batch_size}"; expected a multiple of {world.size}, the number of ranks'
        )
    train, validation = load_images(args.data)
    torch.manual_seed(args.seed)
    net = Net()
    if args.weights:
        net.load_state_dict(load_file(args.weights))
    ddp = lockstep.DistributedDataParallel(net, world)
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9)
    loader = lockstep.data.DataLoader(train, world, batch_size=args.batch_size // world.size, seed=args.seed)
    losses = []
    num_steps, step = args.epochs * len(loader), 0
    for epoch in range(args.epochs):
        for x, y in loader.epoch(epoch):
            step += 1
            done = step / num_steps  # warm-up for a tenth of the steps, then linear decay
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(10 * done, 1 - done)
            optimizer.zero_grad()
            loss = functional.nll_loss(net(x), y)
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            world.all_reduce(mean, "mean")  # only for the log: backward() has averaged the gradients
            losses.append(mean.item())
        loss, accuracy = evaluate(net, validation, world)
        if world.rank == 0:
            print(f"epoch {epoch + 1}: validation loss {loss:.4f}, accuracy {100 * accuracy:.2f} %", flush=True)
    if world.rank == 0 and args.loss_log:
        pathlib.Path(args.loss_log).write_text("".join(f"{loss:.17g}\n" for loss in losses))
    if world.rank == 0 and args.save:
        save_file(net.state_dict(), args.save)
    del ddp


if __name__ == "__main__":
    main()
