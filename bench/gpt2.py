"""Measures tokens per second of a training step of GPT-2 (124 million parameters, the model of examples/python) on two
ranks of this host: Lockstep's fused AdamW beside PyTorch's DistributedDataParallel over Gloo with its fused AdamW.

  python bench/gpt2.py --lockstep build/release/bin/lockstep --package build/release/python

Jobs of the two take turns; each job starts anew. Prints one JSON object per length and precision: the medians over all
steps of all turns, and their ratio.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from torch.nn import functional

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples/python"))
import gpt_model  # noqa: E402

RANKS = 2


def work(impl, precision, length, steps):
    """Runs on each rank. Rank 0 prints the seconds of each step after the first two."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = gpt_model.Gpt(50257, **gpt_model.SIZES["gpt2"])
    if impl == "lockstep":
        import lockstep

        world = lockstep.init()
        rank, call = world.rank, net
        ddp = lockstep.DistributedDataParallel(net, world)
        optimizer = lockstep.optim.AdamW(ddp, lr=3e-4)
    else:
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
        call = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True)
    torch.manual_seed(2 + rank)
    text = torch.randint(50257, (1, length + 1))
    seconds, losses = [], []
    for _ in range(steps + 2):
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = functional.cross_entropy(call(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    if rank == 0:
        print("\n" + json.dumps({"seconds": seconds[2:], "losses": losses}), flush=True)


def run(args, impl, precision, length):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(args.package.resolve())}
    if impl == "lockstep":
        words = [args.lockstep, "run", "-n", RANKS, "--", sys.executable]
    else:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
    words += [pathlib.Path(__file__).resolve(), "--work", impl, precision, length, args.steps]
    with tempfile.TemporaryDirectory() as folder:  # torchrun leaves a folder behind
        environment["TMPDIR"] = folder
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=environment, check=False)
    found = [line for line in done.stdout.splitlines() if '{"seconds"' in line]
    if not found:
        sys.exit(f"{impl}: {done.stdout}{done.stderr}")
    return json.loads(found[0][found[0].index("{") :])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", type=pathlib.Path)
    parser.add_argument("--package", type=pathlib.Path, help="the folder that contains the package lockstep")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024], help="tokens of a rank in a step")
    parser.add_argument("--precisions", nargs="+", choices=["32", "bf16"], default=["32", "bf16"])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="steps of a job that are measured")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        impl, precision, length, steps = args.work
        return work(impl, precision, int(length), int(steps))
    for length in args.lengths:
        for precision in args.precisions:
            seconds, losses = {"lockstep": [], "pytorch-ddp": []}, {}
            for _ in range(args.turns):
                for impl, all_seconds in seconds.items():
                    result = run(args, impl, precision, length)
                    all_seconds += result["seconds"]
                    losses[impl] = result["losses"]
            rates = {impl: RANKS * length / statistics.median(values) for impl, values in seconds.items()}
            row = {"length": length, "precision": precision, "ranks": RANKS}
            row |= {f"tokens_per_s_{impl}": round(rate, 1) for impl, rate in rates.items()}
            row["ratio"] = round(rates["lockstep"] / rates["pytorch-ddp"], 3)
            pairs = zip(losses["lockstep"], losses["pytorch-ddp"], strict=True)
            row["largest_difference_of_losses"] = max(abs(a - b) for a, b in pairs)
            print(json.dumps(row), flush=True)
    return None


if __name__ == "__main__":
    main()
