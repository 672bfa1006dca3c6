"""Trains GPT-2 on any text, from the size of a demonstration to 124 million parameters, and then generates text: the
Python form of examples/03_gpt, with the same results. The model is in gpt_model.py.

  lockstep run -n 2 python gpt.py --corpus FILE
"""

import argparse
import math
import pathlib
import sys

import torch
from gpt_model import SIZES, Gpt
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import lockstep


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--corpus", help="text file: tokens are characters")
    source.add_argument("--tokens", help="file of make_tokens.py")
    parser.add_argument("--size", choices=SIZES, default="demo", help="gpt2 has 124 million parameters")
    parser.add_argument("--steps", type=int, default=600, help="updates of the parameters; 0: only evaluates")
    parser.add_argument("--batch-size", type=int, default=16, help="windows of text per update, over all ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="parts of the batch that a rank computes in turn")
    parser.add_argument("--block", type=int, default=0, help="tokens in a window; 0: as many as the size has")
    parser.add_argument("--lr", type=float, default=3e-3, help="maximum learning rate")
    parser.add_argument("--dropout", type=float, default=0.0, help="probability of dropout")
    parser.add_argument("--precision", choices=["32", "bf16-mixed", "fp16-mixed"], default="32")
    parser.add_argument("--recompute", action="store_true", help="save memory: run each block again in backward()")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights, the windows and the sample")
    parser.add_argument("--sample", type=int, default=300, help="tokens to generate at the end")
    parser.add_argument("--weights", help="start with the weights in this file (safetensors)")
    parser.add_argument("--save", help="write the trained model to this file (safetensors)")
    parser.add_argument("--folder", help="keep checkpoints here; the same command resumes from the newest")
    parser.add_argument("--save-every", type=int, default=100, help="updates between two checkpoints")
    parser.add_argument("--loss-log", help="write the loss of each step on rank 0 to this file, one per line")
    return parser.parse_args()


class Windows(torch.utils.data.Dataset):
    """Windows of a text that do not overlap, and the tokens that follow each of their tokens."""

    def __init__(self, ids, block):
        self.ids, self.block = ids, block

    def __len__(self):
        return (len(self.ids) - self.block - 1) // self.block + 1

    def __getitem__(self, index):
        begin = index * self.block
        window = self.ids[begin : begin + self.block + 1].long()
        return window[:-1], window[1:]


def read_text(args):
    """Returns the tokens of the text, and the bytes that each token stands for."""
    if args.tokens:
        try:
            file = load_file(args.tokens)
            data, ends = bytes(file["bytes"].tolist()), file["ends"].tolist()
            return file["tokens"], [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        except (OSError, KeyError, SafetensorError) as error:
            sys.exit(f'gpt.py: --tokens is "{args.tokens}"; expected a file of make_tokens.py: {error}')
    data = pathlib.Path(args.corpus).read_bytes()
    characters = [character.encode() for character in data.decode()]
    symbols = sorted(set(characters))
    if len(symbols) > 256:
        return torch.tensor(list(data)), [bytes([byte]) for byte in range(256)]
    numbers = {symbol: number for number, symbol in enumerate(symbols)}
    return torch.tensor([numbers[character] for character in characters]), symbols


@torch.no_grad()
def evaluate(model, windows, world):
    """Returns the mean loss over at most 256 windows that are spread over the text. Collective."""
    model.eval()
    count = min(len(windows), 256)
    spread = torch.utils.data.Subset(windows, [index * len(windows) // count for index in range(count)])
    loader = lockstep.data.DataLoader(spread, world, batch_size=8, shuffle=False, mode="exact")
    total = torch.zeros(1, dtype=torch.float64)
    for tokens, following in loader.epoch(0):
        total += model.loss(tokens.to(world.device), following.to(world.device)).item() * len(tokens)
    world.all_reduce(total)
    model.train()
    return total.item() / count


def rate_at(step, steps, lowest):
    """The factor of the learning rate: a linear warm-up for a tenth of the steps, then a cosine decay to `lowest`."""
    warm_up = steps // 10 + 1
    if step < warm_up:
        return 0.01 + 0.99 * step / warm_up
    done = min(1.0, (step - warm_up) / steps)
    return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * done))


def open_loss_log(path, steps):
    """Opens the file of losses after the lines of the first `steps` steps; a run that was killed may have written
    more."""
    if not path:
        return None
    old = pathlib.Path(path).read_text().splitlines(keepends=True)[:steps] if steps else []
    log = open(path, "w", buffering=1)  # noqa: SIM115
    log.writelines(old)
    return log


def train(model, windows, args, world):
    """Trains to the end, or exits if the launcher asks the training to stop."""
    state = None
    if args.folder:
        settings = {"batch_size": args.batch_size}
        state = lockstep.checkpoint.TrainingState(world, f"{args.folder}/checkpoints", settings=settings)
    ddp = lockstep.DistributedDataParallel(model, world, bucket_layout=state.bucket_layout("ddp") if state else "")
    optimizer = lockstep.optim.AdamW(ddp, lr=args.lr, weight_decay=0.01)
    size = args.batch_size // world.size // args.accumulate
    loader = lockstep.data.DataLoader(windows, world, batch_size=size, seed=args.seed)
    kind = world.device.type
    scaler = torch.amp.GradScaler(kind, enabled=args.precision == "fp16-mixed")
    dtype = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(args.precision)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, args.steps, 0.1))
    torch.manual_seed(args.seed + 1 + world.rank)  # other dropout on each rank
    step = 0
    if state:
        state.add("model", model).add("ddp", ddp).add("optimizer", optimizer).add("schedule", schedule)
        state.add("scaler", scaler).add("loader", loader).add("step", 0).add_random_state().resume(train_on=True)
        step = state["step"]
    first, log = step, open_loss_log(args.loss_log if world.rank == 0 else None, step)
    part, loss_of_step = 0, torch.zeros((), device=world.device)
    while step < args.steps:
        for tokens, following in loader:
            with torch.autocast(kind, dtype, enabled=dtype is not None):
                loss = model.loss(tokens.to(world.device), following.to(world.device)) / args.accumulate
            loss_of_step += loss.detach()
            part += 1
            if part < args.accumulate:
                with ddp.no_sync():
                    scaler.scale(loss).backward()
                continue
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() >= scale:  # else the step was skipped
                schedule.step()
            optimizer.zero_grad()
            if log:
                print(f"{loss_of_step.item():.17g}", file=log)
            part, loss_of_step = 0, torch.zeros_like(loss_of_step)
            step += 1
            if step == args.steps:
                break
            stop = world.stop_requested()  # the same on all ranks
            if state:
                state["step"] = step
                if stop or step % args.save_every == 0:
                    state.save_async(step)
            if stop:
                sys.exit(lockstep.PREEMPTED)
    if state and (step > first or not state.is_finished):
        state["step"] = step
        state.save(step, finished=True)


@torch.no_grad()
def generate(model, symbols, start, length):
    """Generates `length` tokens after `start`, each drawn from the distribution that the model predicts."""
    model.eval()
    context, text = start.unsqueeze(0), b""
    for _ in range(length):
        following = torch.multinomial(torch.softmax(model(context)[0, -1] / 0.8, -1), 1)  # temperature 0.8
        text += symbols[following.item()]
        context = torch.cat([context, following.unsqueeze(0)], 1)[:, -len(start) :]
    return text.decode(errors="replace")


def main():
    args = parse_arguments()
    world = lockstep.init()
    if args.batch_size % (world.size * args.accumulate) != 0:
        expected = f"a multiple of the number of ranks times --accumulate, {world.size * args.accumulate}"
        sys.exit(f'gpt.py: --batch-size is "{args.batch_size}"; expected {expected}')
    ids, symbols = read_text(args)
    size = dict(SIZES[args.size])
    block = args.block or size["block"]
    size["block"] = block if args.size == "demo" else max(block, size["block"])
    split = int(len(ids) * 0.95)
    training, validation = Windows(ids[:split], block), Windows(ids[split:], block)
    torch.manual_seed(args.seed)
    if args.steps == 0 and args.weights and world.device.type == "cpu":
        with torch.device("meta"):
            model = Gpt(len(symbols), **size)
        lockstep.host_shared(model, world, args.weights)  # one copy for all ranks of a host
    else:
        model = Gpt(len(symbols), **size, dropout=args.dropout, recompute=args.recompute)
        if args.weights:
            model.load_state_dict(load_file(args.weights))
        model.to(world.device)
    if world.rank == 0:
        count = sum(p.numel() for p in model.parameters())
        print(f"{len(ids)} tokens, {len(symbols)} distinct; {count} parameters; {world.size} ranks", flush=True)
    before = evaluate(model, validation, world)
    if args.steps:
        train(model, training, args, world)
    after = evaluate(model, validation, world)
    if world.rank != 0:
        return
    print(f"validation loss after: {after:.4f} (before: {before:.4f})")
    if args.save:
        save_file(model.state_dict(), args.save, metadata={"format": "pt"})
    if args.sample > 0:
        print("\n" + generate(model, symbols, validation[0][0].to(world.device), args.sample))


if __name__ == "__main__":
    main()
