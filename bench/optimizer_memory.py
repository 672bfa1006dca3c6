#!/usr/bin/env python3
"""Measures the memory of Adam's state per rank, with torch::optim, with Lockstep, and sharded over the ranks.

Usage: optimizer_memory.py --bin DIR [--ranks N] [--width W] [--layers L]

Prints a line of JSON for each kind and transport, with a comparison with torch's Adam: bytes_ratio (of state tensors),
pss_ratio (of the growth of memory), losses_apart (the largest difference of losses).
"""

import argparse
import json
import subprocess

LIMIT_S = 600


def measure(args, kind, transport):
    words = [
        f"{args.bin}/lockstep",
        "run",
        "-n",
        str(args.ranks),
        "--bind",
        "none",
        "--transport",
        transport,
        "--",
        f"{args.bin}/bench_optimizer_memory",
        kind,
        str(args.width),
        str(args.layers),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: code {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout[done.stdout.index("{") :])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)  # 50.4 million parameters
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()
    baseline = measure(args, "torch", "tcp")
    for kind, transport in (("torch", "tcp"), ("ours", "tcp"), ("sharded", "tcp"), ("ours", "shm")):
        result = baseline if kind == "torch" else measure(args, kind, transport)
        result["bytes_ratio"] = round(result["bytes"] / baseline["bytes"], 4)
        result["pss_ratio"] = round(result["pss"] / baseline["pss"], 4)
        result["losses_apart"] = max(abs(a - b) for a, b in zip(result["losses"], baseline["losses"], strict=True))
        print(json.dumps(result), flush=True)


main()
