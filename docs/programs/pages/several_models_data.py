"""The models and the data of several_models.py and several_models_before.py, and their losses in one process."""

import torch
from torch import nn
from torch.nn import functional

STEPS, SIZE = 10, 8


def make_models():
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    discriminator = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    return generator, discriminator


def batches_of(rank):
    """Yields real points, and noise for the generator."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        yield 1 + 0.3 * torch.randn(SIZE, 2, generator=generator), torch.randn(SIZE, 4, generator=generator)


def bce(output, label):
    return functional.binary_cross_entropy_with_logits(output, torch.full_like(output, label))


def losses_alone(size):
    """Returns the losses of rank 0 in a training of `size` ranks, whose parts of a batch one process computes."""
    generator, discriminator = make_models()
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-2)
    losses = []
    for parts in zip(*[batches_of(rank) for rank in range(size)], strict=True):
        fakes = [generator(noise) for _, noise in parts]
        of_discriminator.zero_grad()
        both = [
            bce(discriminator(real), 1.0) + bce(discriminator(fake.detach()), 0.0)
            for (real, _), fake in zip(parts, fakes, strict=True)
        ]
        (sum(both) / size).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        fooled = [bce(discriminator(fake), 1.0) for fake in fakes]
        (sum(fooled) / size).backward()
        of_generator.step()
        losses.append((both[0].item(), fooled[0].item()))
    return torch.tensor(losses)
