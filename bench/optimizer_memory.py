#!/usr/bin/env python3
"""What the state of Adam takes of each rank's memory: torch::optim's, ours, and ours divided between the ranks.

state.py --bin DIR [--ranks N] [--width W] [--layers L]: prints a line of JSON for each kind and transport, and with each what its memory and its losses are beside torch's:
bytes_ratio (of state tensors), pss_ratio (of what memory grew by), losses_apart (the largest difference).
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
    peer = measure(args, "torch", "gloo")
    for kind, transport in (("torch", "gloo"), ("ours", "gloo"), ("sharded", "gloo"), ("ours", "shm")):
        found = peer if kind == "torch" else measure(args, kind, transport)
        found["bytes_ratio"] = round(found["bytes"] / peer["bytes"], 4)
        found["pss_ratio"] = round(found["pss"] / peer["pss"], 4)
        found["losses_apart"] = max(abs(a - b) for a, b in zip(found["losses"], peer["losses"], strict=True))
        print(json.dumps(found), flush=True)


main()
