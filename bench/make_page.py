#!/usr/bin/env python3
"""Measures with `lockstep bench` and writes docs/benchmarks.md and the plots in docs/benchmarks/.

make_page.py [--bin DIR]            measures; keeps the lines of JSON in build/bench.jsonl
make_page.py --from FILE            writes the page from kept lines
make_page.py --memory               measures memory alone and replaces its section of the page
Prints a comparison with the targets at the end.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import benchmark_page
import targets

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The measurements, with numbers of rounds for about 20 minutes in total on an idle machine with two cores.
PARTS = [
    ["all-reduce", "-n", "2"],
    ["all-reduce", "-n", "4", "--rounds", "5"],
    ["step", "--model", "mlp-50m,mlp-65m,mlp-6m,transformer-2m,cnn-1m", "--rounds", "5"],
    ["step", "--model", "mlp-50m", "--optimizer", "adamw", "--rounds", "5"],
    ["launch", "--rounds", "3"],
    ["memory"],
    ["arena", "--rounds", "5"],
]


def more_mpis():
    folders = sorted(ROOT.glob(".deps/baselines/*/bin/mpicc"))
    return [word for mpicc in folders for word in ("--mpi", str(mpicc.parent.parent))]


def measure(bin_dir, kept, parts=PARTS):
    """Runs the parts, one after the other, and appends their lines to `kept` as they arrive."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with open(kept, "w") as file:
        for part in parts:
            words = [os.path.join(bin_dir, "lockstep"), "bench", *part, "--json"]
            if part[0] in ("all-reduce", "launch"):
                words += more_mpis()
            print(f"\n$ {' '.join(words)}    # {time.monotonic() - begin:.0f} s so far", file=sys.stderr, flush=True)
            process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            for line in process.stdout:
                file.write(line)
                file.flush()
            if process.wait() != 0:
                raise SystemExit(f"{' '.join(part)} exited with {process.returncode}")
    print(f"\nmeasured in {time.monotonic() - begin:.0f} s", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default=str(ROOT / "build/release/bin"))
    parser.add_argument("--from", dest="source", type=pathlib.Path)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs", help="folder for benchmarks.md")
    args = parser.parse_args()
    source = args.source or ROOT / "build/bench.jsonl"
    if args.memory:
        source = ROOT / "build/bench-memory.jsonl"
        measure(args.bin, source, [["memory"]])
        benchmark_page.replace_memory([json.loads(line) for line in source.read_text().splitlines()], args.out)
        return
    if not args.source:
        measure(args.bin, source)
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    benchmark_page.write(lines, args.out)
    print(f"wrote {args.out / 'benchmarks.md'}\n")
    for line in targets.compare(lines):
        print(line)


main()
