"""Trains a small transformer on any text, character by character, and then generates text: the Python form of
examples/03_char_gpt, with the same results. Shows mixed precision with a GradScaler, gradient clipping and schedules.

  lockstep run -n 2 python char_gpt.py --corpus FILE
"""

import argparse
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
    parser.add_argument("--corpus", required=True, help="text file")
    parser.add_argument("--steps", type=int, default=600, help="updates of the parameters")
    parser.add_argument("--batch-size", type=int, default=16, help="windows of text per step, over all ranks")
    parser.add_argument("--block", type=int, default=128, help="characters in a window")
    parser.add_argument("--lr", type=float, default=3e-3, help="maximum learning rate")
    parser.add_argument("--precision", choices=["32", "bf16-mixed", "fp16-mixed"], default="32")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights, the windows and the sample")
    parser.add_argument("--sample", type=int, default=300, help="characters to generate at the end")
    parser.add_argument("--weights", help="start with the weights in this file (safetensors)")
    parser.add_argument("--save", help="write the trained model to this file (safetensors)")
    parser.add_argument("--loss-log", help="write the loss of each step on rank 0 to this file, one per line")
    return parser.parse_args()


class Windows(torch.utils.data.Dataset):
    """Windows of a text that do not overlap, and the characters that follow each of their characters."""

    def __init__(self, ids, block):
        self.ids, self.block = ids, block

    def __len__(self):
        return (len(self.ids) - self.block - 1) // self.block + 1

    def __getitem__(self, index):
        begin = index * self.block
        return self.ids[begin : begin + self.block], self.ids[begin + 1 : begin + self.block + 1]


class Block(nn.Module):
    """Causal self-attention, then a feed-forward network, both pre-norm with a residual connection."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.narrow(functional.gelu(self.widen(self.norm2(x))))

    def attend(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mix(mixed.transpose(1, 2).reshape(batch, length, width))


class Gpt(nn.Module):
    """Maps characters, int64 [batch, length], to the log-probabilities of the next one."""

    def __init__(self, vocabulary, block, width=128, layers=4, heads=4):
        super().__init__()
        self.block = block
        self.characters, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "norm" not in name:
                    parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.zero_()

    def forward(self, text):
        x = self.characters(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        # The output layer shares its weights with the embedding.
        return functional.log_softmax(self.norm(x) @ self.characters.weight.t(), -1)

    def loss(self, text, following):
        """The mean loss over all characters of the batch."""
        return functional.nll_loss(self(text).flatten(0, 1), following.flatten())


@torch.no_grad()
def evaluate(model, windows, world):
    """Returns the mean loss over at most 256 windows that are spread over the text. Collective."""
    count = min(len(windows), 256)
    spread = torch.utils.data.Subset(windows, [index * len(windows) // count for index in range(count)])
    loader = lockstep.data.DataLoader(spread, world, batch_size=32, shuffle=False, mode="exact")
    total = torch.zeros(1, dtype=torch.float64)
    for text, following in loader.epoch(0):
        total += model.loss(text.to(world.device), following.to(world.device)).item() * len(text)
    world.all_reduce(total)
    return total.item() / count


def rate_at(step, steps, lowest):
    """The factor of the learning rate: a linear warm-up for a tenth of the steps, then a cosine decay to `lowest`."""
    warm_up = steps // 10 + 1
    if step < warm_up:
        return 0.01 + 0.99 * step / warm_up
    done = min(1.0, (step - warm_up) / steps)
    return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * done))


def train(model, windows, args, world):
    """Returns this rank's losses."""
    ddp = lockstep.DistributedDataParallel(model, world)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.01)
    loader = lockstep.data.DataLoader(windows, world, batch_size=args.batch_size // world.size, seed=args.seed)
    kind = world.device.type
    scaler = torch.amp.GradScaler(kind, enabled=args.precision == "fp16-mixed")
    dtype = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(args.precision)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, args.steps, 0.1))
    losses = []
    epoch = 0
    while len(losses) < args.steps:
        for text, following in loader.epoch(epoch):
            if len(losses) == args.steps:
                break
            optimizer.zero_grad()
            with torch.autocast(kind, dtype, enabled=dtype is not None):
                loss = model.loss(text.to(world.device), following.to(world.device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            losses.append(loss.item())
        epoch += 1
    del ddp
    return losses


@torch.no_grad()
def generate(model, symbols, start, length):
    """Generates `length` characters after `start`, each drawn from the distribution that the model predicts."""
    context, text = start.unsqueeze(0), ""
    for _ in range(length):
        following = torch.multinomial((model(context)[0, -1] / 0.8).exp(), 1)  # temperature 0.8
        text += symbols[following.item()]
        context = torch.cat([context, following.unsqueeze(0)], 1)[:, -model.block :]
    return text


def main():
    args = parse_arguments()
    world = lockstep.init()
    if args.batch_size % world.size != 0:
        sys.exit(f'char_gpt.py: --batch-size is "{args.batch_size}"; expected a multiple of {world.size}')
    text = pathlib.Path(args.corpus).read_text(encoding="utf-8")
    symbols = sorted(set(text), key=lambda symbol: symbol.encode())
    numbers = {symbol: number for number, symbol in enumerate(symbols)}
    ids = torch.tensor([numbers[symbol] for symbol in text])
    split = int(len(ids) * 0.95)
    training, validation = Windows(ids[:split], args.block), Windows(ids[split:], args.block)
    torch.manual_seed(args.seed)
    model = Gpt(len(symbols), args.block)
    if args.weights:
        model.load_state_dict(load_file(args.weights))
    model.to(world.device)
    if world.rank == 0:
        print(f"{len(text)} characters, {len(symbols)} distinct; {world.size} ranks", flush=True)
    before = evaluate(model, validation, world)
    losses = train(model, training, args, world)
    after = evaluate(model, validation, world)
    if world.rank != 0:
        return
    print(f"validation loss after: {after:.4f} (before: {before:.4f})")
    if args.loss_log:
        pathlib.Path(args.loss_log).write_text("".join(f"{loss:.17g}\n" for loss in losses))
    if args.save:
        save_file(model.state_dict(), args.save)
    if args.sample > 0:
        print("\n" + generate(model, symbols, validation[0][0].to(world.device), args.sample))


if __name__ == "__main__":
    main()
