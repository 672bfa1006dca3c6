"""Trains a small style-based generator of images (StyleGAN2: Karras et al., 2020) on several ranks: modulated
convolutions, noise, a discriminator with the R1 penalty, and an average of the generator's weights (EMA), from which
the samples come.

  lockstep run -n 2 python stylegan.py --data FOLDER --samples samples.png     # FOLDER has the files of MNIST
"""

import argparse
import pathlib
import struct
import sys
import zlib

import torch
from mnist import load_images
from torch import nn
from torch.nn import functional
from torch.optim import swa_utils

import lockstep

R1_EVERY = 8  # steps between two penalties, as "lazy regularisation" in the paper


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="directory with the MNIST files, compressed (.gz) or not")
    parser.add_argument("--samples", default="samples.png", help="PNG file with 64 images, written after each epoch")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, over all ranks")
    parser.add_argument("--width", type=int, default=64, help="channels of the layers, and numbers in a style")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of both models")
    parser.add_argument("--gamma", type=float, default=1.0, help="weight of the R1 penalty")
    parser.add_argument("--ema", type=float, default=0.995, help="what each step keeps of the average")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, noise and the order of the images")
    return parser.parse_args()


class SlowLinear(nn.Module):
    """A linear layer that Adam changes a hundredth as fast: otherwise the styles become equal."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(width, width) * 100), 0.01 * (2 / width) ** 0.5

    def forward(self, x):
        return functional.linear(x, self.gain * self.weight)


class ModulatedConv(nn.Module):
    """A convolution whose input channels each style scales; the output is scaled back to unit variance."""

    def __init__(self, style, inputs, outputs, kernel=3, demodulate=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, kernel, kernel))
        self.scale = nn.Linear(style, inputs)
        nn.init.normal_(self.scale.weight, std=style**-0.5)
        nn.init.ones_(self.scale.bias)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.demodulate, self.gain = demodulate, (inputs * kernel**2) ** -0.5

    def forward(self, x, style):
        count, inputs, height, width = x.shape
        weight = self.gain * self.weight * self.scale(style).view(count, 1, inputs, 1, 1)
        if self.demodulate:
            weight = weight * (weight.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        x = functional.conv2d(  # one group for each image
            x.reshape(1, -1, height, width), weight.flatten(0, 1), padding=weight.shape[-1] // 2, groups=count
        )
        return x.view(count, -1, height, width) + self.bias.view(-1, 1, 1)


class Block(nn.Module):
    """Doubles the size of the image."""

    def __init__(self, width):
        super().__init__()
        self.convs = nn.ModuleList(ModulatedConv(width, width, width) for _ in range(2))
        self.noise = nn.Parameter(torch.zeros(2))  # how much of it is added
        self.to_image = ModulatedConv(width, width, 1, kernel=1, demodulate=False)

    def forward(self, x, image, style):
        x, image = (functional.interpolate(t, scale_factor=2, mode="bilinear") for t in (x, image))
        for conv, strength in zip(self.convs, self.noise, strict=True):
            x = conv(x, style)
            x = functional.leaky_relu(x + strength * torch.randn_like(x[:, :1]), 0.2) * 2**0.5
        return x, image + self.to_image(x, style)


class Generator(nn.Module):
    """[n, width] normal numbers to images [n, 1, 32, 32], about from -1 to 1."""

    def __init__(self, width):
        super().__init__()
        self.mapping = nn.Sequential(*(layer for _ in range(3) for layer in (SlowLinear(width), nn.LeakyReLU(0.2))))
        self.start = nn.Parameter(torch.randn(1, width, 4, 4))
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, noise):
        style = self.mapping(noise * (noise.square().mean(1, keepdim=True) + 1e-8).rsqrt())
        x = self.start.expand(len(noise), -1, -1, -1)
        image = x.new_zeros(len(noise), 1, 4, 4)
        for block in self.blocks:
            x, image = block(x, image, style)
        return image


class Discriminator(nn.Module):
    """Images to a number each: high for real ones."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(1, width, 1)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.last = nn.Sequential(
            nn.Conv2d(width + 1, width, 3, padding=1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(16 * width, 1)
        )

    def forward(self, image):
        x = functional.leaky_relu(self.first(image), 0.2)
        for conv in self.convs:
            x = functional.avg_pool2d(functional.leaky_relu(conv(x), 0.2) + x, 2)
        spread = x.std(0, correction=0).mean().expand(len(x), 1, 4, 4)  # shows whether a batch has variety
        return self.last(torch.cat([x, spread], 1))


def r1_penalty(discriminator, real):
    """Half the squared gradient of the discriminator at real images (Mescheder et al., 2018)."""
    real = real.detach().requires_grad_()
    (slope,) = torch.autograd.grad(discriminator(real).sum(), real, create_graph=True)
    return slope.square().sum((1, 2, 3)).mean() / 2


def write_png(path, images):
    """Writes images [64, 1, 32, 32] as a grey square of 8 x 8."""
    pixels = ((images.clamp(-1, 1) + 1) * 127.5).byte().view(8, 8, 32, 32).transpose(1, 2).reshape(256, 256)
    rows = b"".join(b"\0" + bytes(row) for row in pixels.tolist())

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 256, 256, 8, 0, 0, 0, 0)
    data = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    pathlib.Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + data)


def main():
    args = parse_arguments()
    world = lockstep.init()
    if args.batch_size % world.size != 0:
        sys.exit(f'stylegan.py: --batch-size is "{args.batch_size}"; expected a multiple of {world.size}')
    images, _ = load_images(args.data)
    torch.manual_seed(args.seed)
    generator, discriminator = Generator(args.width).to(world.device), Discriminator(args.width).to(world.device)
    samples_noise = torch.randn(64, args.width, device=world.device)
    ddp_g = lockstep.DistributedDataParallel(generator, world)
    ddp_d = lockstep.DistributedDataParallel(discriminator, world)
    optimizer_g = lockstep.optim.Adam(ddp_g, lr=args.lr, betas=(0.0, 0.99))
    optimizer_d = lockstep.optim.Adam(ddp_d, lr=args.lr, betas=(0.0, 0.99))
    average = swa_utils.AveragedModel(generator, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(args.ema))
    loader = lockstep.data.DataLoader(images, world, batch_size=args.batch_size // world.size, seed=args.seed)
    torch.manual_seed(args.seed + 1 + world.rank)  # other noise on each rank
    step = 0
    for epoch in range(args.epochs):
        sums = torch.zeros(3)
        for x, _ in loader.epoch(epoch):
            real = functional.pad(x.to(world.device) * 2 - 1, (2, 2, 2, 2), value=-1)
            fake = generator(torch.randn(len(real), args.width, device=world.device))

            optimizer_d.zero_grad()
            loss_d = (
                functional.softplus(discriminator(fake.detach())) + functional.softplus(-discriminator(real))
            ).mean()
            penalty = r1_penalty(discriminator, real) if step % R1_EVERY == 0 else torch.zeros(())
            (loss_d + args.gamma * R1_EVERY * penalty).backward()
            optimizer_d.step()

            discriminator.requires_grad_(False)
            optimizer_g.zero_grad()
            loss_g = functional.softplus(-discriminator(fake)).mean()
            loss_g.backward()
            optimizer_g.step()
            discriminator.requires_grad_(True)

            average.update_parameters(generator)
            sums += torch.stack([loss_d.detach().cpu(), loss_g.detach().cpu(), penalty.detach().cpu() * R1_EVERY])
            step += 1
        world.all_reduce(sums, "mean")  # on all ranks
        if world.rank == 0:
            loss_d, loss_g, penalty = (sums / len(loader)).tolist()
            print(
                f"epoch {epoch + 1}: losses {loss_d:.3f} and {loss_g:.3f}, R1 {penalty:.2g}",
                flush=True,
            )
            with torch.no_grad():
                write_png(args.samples, average(samples_noise).cpu())


if __name__ == "__main__":
    main()
