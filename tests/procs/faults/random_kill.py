#!/usr/bin/env python3
"""Kills a random rank of a training at a random time, many times.

Usage: random_kill.py --lockstep PATH --program PATH_OF_TRAINING_REPLICAS [--runs N] [--ranks N] [--seed N]
Each run must end within 5 s of the kill with exit code 137, the FATAL line of that rank as the last line, and no
process left. Processes are found by a tag in their environment. Prints one line per run and a summary. The exit code
is 1 if a run failed.
"""

import argparse
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
from tagged_processes import find_ranks, find_tagged, kill_tagged  # noqa: E402

LIMIT_S = 5.0
MARK = "LOCKSTEP_TEST_RANDOM_KILL"


def rank_pids(mark, ranks, deadline):
    """Blocks until all ranks run the program. Returns {rank: pid}, or None at the deadline."""
    while time.monotonic() < deadline:
        found = find_ranks(MARK, mark)
        if len(found) == ranks:
            return found
        time.sleep(0.005)
    return None


def one_run(args, number, rng):
    mark = f"{os.getpid()}.{number}"
    run = [args.lockstep, "run", "-n", str(args.ranks), "--bind", "none", "--"]
    job = subprocess.Popen(
        [*run, args.program, "1000000", "exchange", "/dev/null"],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        pids = rank_pids(mark, args.ranks, time.monotonic() + 20)
        if pids is None:
            return "the ranks did not start"
        time.sleep(rng.uniform(0, 1.5))  # from loading the program to the middle of training
        victim = rng.randrange(args.ranks)
        begin = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        try:
            _, err = job.communicate(timeout=4 * LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"rank {victim}: the launcher did not end in {4 * LIMIT_S:.0f} s"
        took = time.monotonic() - begin
        last = err.rstrip("\n").rsplit("\n", 1)[-1]
        wrong = []
        if took > LIMIT_S:
            wrong.append(f"took {took:.1f} s")
        if job.returncode != 128 + signal.SIGKILL:
            wrong.append(f"exit code {job.returncode}")
        if not re.match(rf"FATAL cause=RANK_DIED rank={victim} .*pid={pids[victim]} .*SIGKILL", last):
            wrong.append(f"last line: {last}")
        left = find_tagged(MARK, mark)
        if left:
            wrong.append(f"left: {sorted(left)}")
        print(
            f"run {number}: rank {victim} pid {pids[victim]}, {took:.2f} s{': ' + '; '.join(wrong) if wrong else ''}",
            flush=True,
        )
        return "; ".join(wrong)
    finally:
        kill_tagged(MARK, mark)
        job.wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    rng = random.Random(seed)
    failed = sum(bool(one_run(args, number, rng)) for number in range(args.runs))
    print(f"{args.runs - failed} of {args.runs} runs passed")
    sys.exit(1 if failed else 0)


main()
