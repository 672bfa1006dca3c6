#!/usr/bin/env python3
"""Tests that children which ranks fork, and which then throw, return from main() or exit, do not affect the job, and
that signals end them although the ranks handle these.

Usage: children.py --lockstep PATH --program PATH_OF_FORK_PROBE [--count N] [--transport NAME] [KIND...]
"""

import argparse
import subprocess
import sys
import tempfile

KINDS = ["return", "exec", "throw", "bare", "exit", "crash", "calls", "signals", "values"]
RANKS = 2
TIMEOUT = 100


def run(args, kind, ranks):
    job = [args.lockstep, "run", "-n", str(ranks), "--transport", args.transport, "--", args.program]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*job, kind, args.count],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    steps = int(args.count) * (2 if kind == "values" else 1)
    wanted = [f"[{rank}] {args.count} children, {steps} steps" for rank in range(ranks)]
    if done.returncode == 0 and all(line in done.stdout for line in wanted) and "FATAL" not in done.stderr:
        print(f"ok: {kind} on {ranks} ranks over {args.transport}", flush=True)
        return True
    what = f"{kind} on {ranks} ranks over {args.transport}: exit code {done.returncode}"
    print(f"FAILED: {what}\n{done.stdout}{done.stderr}", flush=True)
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--count", default="10", help="children of each rank")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("kinds", nargs="*", default=KINDS)
    args = parser.parse_args()
    jobs = [(kind, ranks) for kind in args.kinds for ranks in ((1, 2, 3) if kind == "values" else (2,))]
    sys.exit(0 if all([run(args, *job) for job in jobs]) else 1)


if __name__ == "__main__":
    main()
