#!/usr/bin/env python3
"""Measures the cost of a 200 MB checkpoint every ten steps, for Lockstep's asynchronous saves and for PyTorch's.

Usage: checkpoint_save.py --bin DIR [--python PYTHON] [--ranks N] [--rows N,...] [--rounds N] [--turns N]

Prints a line of JSON for each implementation and number of rows per rank and step, with share (the stall of a save as a
fraction of a step) and slower (relative increase of the median step during a save). PYTHON has torch; without it,
PyTorch is not measured. The implementations are measured in turns.
"""

import argparse
import json
import os
import subprocess
import tempfile

LIMIT_S = 1200
HERE = os.path.dirname(os.path.abspath(__file__))


def measure(args, words):
    """Runs a job in a temporary folder and returns its JSON result."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        command = [f"{args.bin}/lockstep", "run", "-n", str(args.ranks), "--bind", "none", "--", *words, folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: code {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout[done.stdout.index("{") :])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True)
    parser.add_argument("--python")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)  # 16.8 million parameters, with AdamW's state 201 MB
    parser.add_argument("--rows", default="512")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--folder", help="directory for checkpoints (default: the system's temporary directory)")
    args = parser.parse_args()
    for rows in args.rows.split(","):
        size = [str(args.width), str(args.layers), rows, str(args.rounds)]
        commands = [
            [f"{args.bin}/bench_checkpoint_save", optimizer, writers, *size]
            for optimizer, writers in (("torch", "one"), ("torch", "all"), ("fused", "one"))
        ]
        if args.python:
            commands += [
                [args.python, f"{HERE}/baselines/checkpoint_save.py", mode, *size] for mode in ("async", "sync")
            ]
        for _ in range(args.turns):
            for words in commands:
                result = measure(args, words)
                print(
                    json.dumps(
                        {
                            "rows": int(rows),
                            **result,
                            "share": round(result["stall"] / result["step"], 4),
                            "slower": round(result["step_saving"] / result["step"] - 1, 4),
                        }
                    ),
                    flush=True,
                )


main()
