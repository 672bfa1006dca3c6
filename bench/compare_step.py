#!/usr/bin/env python3
"""Step times of Lockstep and its peers: 2 ranks, one core each, all started by `lockstep run`, interleaved.

All implementations are started at once and wait; then they run in turns, a few steps each, round after round in a rotating
order, so that whatever slows this machine down for a second slows all of them. The first two steps of a turn are not counted:
they find the caches full of a neighbour's data. Prints every turn as a line of JSON, then for each model and implementation
the median step, the least, and the median over the rounds of (its median step / Lockstep's in the same round).
"""
import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
CPP = ("lockstep", "lockstep-gloo", "reducer", "reducer-views", "local")
PYTHON = {"pytorch": "copies", "pytorch-views": "views"}
STEPS = {"mlp-6m": 8, "mlp-50m": 5}  # in a turn
UNCOUNTED = 2
TURN_LIMIT_S = 120


class Job:
    """One implementation, started and waiting for its turns."""

    def __init__(self, args, name, model, folder):
        turns = f"{folder}/{name}"
        for rank in (0, 1):
            os.mkfifo(f"{turns}.{rank}")
        program = [args.python, str(HERE / "peers/ddp_step.py"), PYTHON[name]] if name in PYTHON else [f"{args.bin}/bench_step", name.split("-gloo")[0]]
        transport = ["--transport", "gloo"] if name == "lockstep-gloo" else []
        self.name = name
        self.process = subprocess.Popen([f"{args.bin}/lockstep", "run", "-n", "2", *transport, "--", *program, model, turns],
                                        stdout=subprocess.PIPE, text=True)
        # For reading too: so that opening does not wait for a program that may have failed to start.
        self.pipes = [os.fdopen(os.open(f"{turns}.{rank}", os.O_RDWR), "r+b", buffering=0) for rank in (0, 1)]

    def turn(self, steps):
        signal.alarm(TURN_LIMIT_S)
        for pipe in self.pipes:
            pipe.write(f"{steps}\n".encode())
        for line in self.process.stdout:
            if '"seconds"' in line:
                print(line[line.index("{"):], end="", flush=True)
                return json.loads(line[line.index("{"):])["seconds"]
        raise SystemExit(f"{self.name} ended with {self.process.wait()}")

    def end(self):
        for pipe in self.pipes:
            pipe.close()
        self.process.wait(timeout=60)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


def compare(args, model):
    times = {name: [] for name in args.impls}
    steps = STEPS[model] + UNCOUNTED
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        try:
            for name in args.impls:
                jobs.append(Job(args, name, model, folder))
            for job in jobs:  # warm: buckets are laid out, replicas have been compared
                job.turn(12)
            for turn in range(args.rounds):
                for job in jobs[turn % len(jobs):] + jobs[:turn % len(jobs)]:
                    times[job.name].append(job.turn(steps)[UNCOUNTED:])
            signal.alarm(0)
            for job in jobs:
                job.end()
        finally:
            for job in jobs:
                job.stop()
    medians = {name: [statistics.median(turn) for turn in turns] for name, turns in times.items()}
    first = medians[args.impls[0]]
    print(f"\n{model}, 2 ranks, {args.rounds} turns of {STEPS[model]} steps: ms a step; ratio to {args.impls[0]}")
    for name, turns in times.items():
        every = [1000 * second for turn in turns for second in turn]
        ratio = statistics.median(own / other for own, other in zip(medians[name], first))
        print(f"  {name:14} median {statistics.median(every):8.2f}   least {min(every):8.2f}   ratio {ratio:.3f}")
    print(flush=True)


def too_long(*_):
    raise SystemExit(f"a turn took more than {TURN_LIMIT_S} s")


def main():
    signal.signal(signal.SIGALRM, too_long)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--impls", nargs="+", choices=[*CPP, *PYTHON], default=[*CPP, *PYTHON])
    parser.add_argument("--bin", default=str(HERE.parent / "build/release/bin"))
    parser.add_argument("--python", default=str(HERE.parent / ".deps/python/bin/python"))
    args = parser.parse_args()
    for model in args.models:
        compare(args, model)


main()
