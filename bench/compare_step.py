#!/usr/bin/env python3
"""Step times of Lockstep and its peers: 2 ranks, one core each, all started by `lockstep run`, interleaved.

usage: bench/compare_step.py [--rounds N] [--steps N] [--bin build/release/bin] [--python .deps/python/bin/python]
Prints every measurement as a line of JSON, then a table of medians over the rounds and the ratios of each round.
"""
import argparse
import json
import pathlib
import statistics
import subprocess

HERE = pathlib.Path(__file__).resolve().parent


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="0: 60 for mlp-6m, 20 for mlp-50m")
    parser.add_argument("--bin", default=str(HERE.parent / "build/release/bin"))
    parser.add_argument("--python", default=str(HERE.parent / ".deps/python/bin/python"))
    args = parser.parse_args()
    impls = {name: [f"{args.bin}/bench_step", name] for name in ("lockstep", "reducer", "reducer-views", "local")}
    impls["pytorch"] = [args.python, str(HERE / "peers/ddp_step.py"), "copies"]
    impls["pytorch-views"] = [args.python, str(HERE / "peers/ddp_step.py"), "views"]
    for model, steps in (("mlp-6m", 60), ("mlp-50m", 20)):
        times = {name: [] for name in impls}
        for turn in range(args.rounds):
            names = list(impls)
            for name in names[turn % len(names):] + names[:turn % len(names)]:
                command = [f"{args.bin}/lockstep", "run", "-n", "2", "--", *impls[name], model, str(args.steps or steps)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=300)
                lines = [line for line in done.stdout.splitlines() if '"median_s"' in line]
                if done.returncode != 0 or len(lines) != 1:
                    raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
                row = json.loads(lines[0][lines[0].index("{"):])
                times[name].append(row["median_s"])
                print(json.dumps(row), flush=True)
        print(f"\n{model}, 2 ranks: median over {args.rounds} rounds of the median step, ms; ratio to lockstep, median of the rounds")
        for name, values in times.items():
            ratio = statistics.median(v / own for v, own in zip(values, times["lockstep"]))
            print(f"  {name:14} {1000 * statistics.median(values):8.2f}   {min(values) * 1000:8.2f} least   {ratio:.3f}")
        print(flush=True)


main()
