"""The models of bench/ranks/models.cc, with the same operations in the same order."""

import torch
from torch import nn
from torch.nn import functional

MLPS = {"mlp-50m": (4096, 3, 16), "mlp-65m": (2560, 10, 16), "mlp-6m": (1024, 6, 64)}  # width, layers, batch
WIDTH, HEADS, BLOCKS, CONTEXT, VOCABULARY = 192, 6, 4, 128, 256


def mlp(width, layers):
    parts = []
    for i in range(layers):
        parts.append(nn.Linear(width, width))
        if i + 1 < layers:
            parts.append(nn.ReLU())
    return nn.Sequential(*parts)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.before_mlp = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (
            self.qkv(self.before_attention(x))
            .view(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.position_ids = torch.arange(CONTEXT)

    def forward(self, text):
        return self.head(self.norm(self.blocks(self.tokens(text) + self.places(self.position_ids))))


def cnn():
    channels = [3, 64, 128, 256, 256]
    parts = []
    for i in range(4):
        parts += [nn.Conv2d(channels[i], channels[i + 1], 3, padding=1), nn.ReLU()]
        if i < 3:
            parts.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def make_task(model):
    """Returns the model, its input, and a function from its output to the loss."""
    if model in MLPS:
        width, layers, batch = MLPS[model]
        x, y = torch.randn(batch, width), torch.randn(batch, width)
        return mlp(width, layers), x, lambda output: functional.mse_loss(output, y)
    if model == "transformer-2m":
        text, following = (torch.randint(VOCABULARY, (4, CONTEXT)) for _ in range(2))
        return Transformer(), text, lambda output: functional.cross_entropy(output.flatten(0, 1), following.flatten())
    if model == "cnn-1m":
        images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
        return cnn(), images, lambda output: functional.cross_entropy(output, labels)
    raise SystemExit(f"unknown model {model}")
