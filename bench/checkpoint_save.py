#!/usr/bin/env python3
"""What a checkpoint of 200 MB every ten steps costs a training on two ranks: ours, written by a thread, beside PyTorch's.

saves.py --bin DIR [--python PYTHON] [--ranks N] [--rows N,...] [--rounds N] [--turns N]: prints a line of JSON for each side and number of rows a rank and step, with share (a save's stall as a part of a step) and slower (how
much longer the median step is while saves are written). PYTHON has torch; without it there is no peer. Sides take turns.
"""

import argparse
import json
import os
import subprocess
import tempfile

LIMIT_S = 1200
HERE = os.path.dirname(os.path.abspath(__file__))


def measured(args, words):
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
    parser.add_argument("--folder", help="where checkpoints go; the system's temporary folder if there is none")
    args = parser.parse_args()
    for rows in args.rows.split(","):
        size = [str(args.width), str(args.layers), rows, str(args.rounds)]
        sides = [
            [f"{args.bin}/bench_checkpoint_save", optimizer, writers, *size]
            for optimizer, writers in (("torch", "one"), ("torch", "all"), ("fused", "one"))
        ]
        if args.python:
            sides += [[args.python, f"{HERE}/peers/saves.py", way, *size] for way in ("async", "sync")]
        for _ in range(args.turns):
            for words in sides:
                found = measured(args, words)
                print(
                    json.dumps(
                        {
                            "rows": int(rows),
                            **found,
                            "share": round(found["stall"] / found["step"], 4),
                            "slower": round(found["step_saving"] / found["step"] - 1, 4),
                        }
                    ),
                    flush=True,
                )


main()
