#!/usr/bin/env python3
"""Runs the programs of training_programs on several ranks and compares their results with those of one rank.

Usage: compare_programs.py --lockstep PATH --program training_programs [--ranks N...] [--transports NAME...]
           [--separate] [--sample N] [--programs NAME...]

Each job runs all programs one after another, or with --separate one of them. With --sample, the transports other than
shm run every N-th program only, each transport others. A job must end within its time limit with
exit code 0 and print no warning or error that its programs do not announce. The results of a program must equal those
of its reference on one rank within its tolerance; of a program that leaves out the reduction, they must differ.
Prints a line per job and per mistake; the exit code is 1 if there was one.
"""

import argparse
import dataclasses
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

FAKE_HOSTS = pathlib.Path(__file__).resolve().parents[2] / "support" / "fake_hosts.sh"
TRANSPORTS = ["shm", "tcp", "hierarchy"]
HOSTS = {1: "0", 2: "0 1", 3: "0 0 1"}  # of the ranks of the transport hierarchy
LIMIT_S = 240
ALARMING = re.compile(r"warn|error|fatal|exception|terminate called|[Ss]egmentation", re.I)


@dataclasses.dataclass
class Program:
    name: str
    tolerance: float
    reference: str
    must_differ: bool
    warning: str


@dataclasses.dataclass
class Job:
    """A finished job: its exit code, its output, and by program the numbers that rank 0 has written."""

    code: int
    output: list
    results: dict


def list_programs(path):
    lines = subprocess.run([path, "--list"], check=True, stdout=subprocess.PIPE, text=True, timeout=240).stdout
    programs = {}
    for line in lines.splitlines():
        name, tolerance, reference, comparison, warning = line.split("\t")
        programs[name] = Program(name, float(tolerance), reference, comparison == "differs", warning)
    return programs


def read_results(path):
    if not os.path.exists(path):
        return None
    values = {}
    for line in pathlib.Path(path).read_text().splitlines():
        name, *numbers = line.split(" ")
        values[name] = [float(number) for number in numbers]
    return values


def run_job(args, ranks, transport, names):
    with tempfile.TemporaryDirectory(prefix="lockstep-test-") as folder:
        hosts = [FAKE_HOSTS, HOSTS[ranks]] if transport == "hierarchy" else []
        options = ["-n", ranks, "--bind", "none", "--hang-timeout", 60]
        if ranks > 1:
            options += ["--transport", transport]
        command = [args.lockstep, "run", *options, "--", *hosts, args.program, folder, *names]
        process = subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate(timeout=240)
            output += f"FATAL: no end within {LIMIT_S} s"
        results = {name: read_results(os.path.join(folder, name)) for name in names}
        return Job(process.returncode, output.splitlines(), results)


def run_all(args, ranks, transport, names):
    """Runs the programs in one job, or in one each with --separate. After a failure, a new job runs the rest."""
    jobs = []
    rest = list(names)
    while rest:
        job = run_job(args, ranks, transport, rest[:1] if args.separate else rest)
        jobs.append(job)
        if args.separate or job.code != 0:
            done = (
                1 if args.separate else next((i + 1 for i, n in enumerate(rest) if job.results[n] is None), len(rest))
            )
            rest = rest[done:]
        else:
            rest = []
    return jobs


def alarms_in(job, programs):
    """Yields (program, line) for each line of the output that its program does not announce."""
    current = {}  # program by rank
    for line in job.output:
        rank, text = re.fullmatch(r"(?:\[(\d+)\] )?(.*)", line).groups()
        if text.startswith("program "):
            current[rank] = programs[text.split()[1]]
        program = current.get(rank)
        if ALARMING.search(text) and not (program and program.warning and program.warning in text):
            yield program.name if program else "the job", line


def check_output(job, ranks, programs):
    """Yields what is wrong with the exit code and the output of a job."""
    for name, line in alarms_in(job, programs):
        yield f"{name} prints: {line}"
    for name in job.results:
        warning = programs[name].warning
        if warning and ranks > 1 and not any(warning in line for line in job.output):
            yield f"{name} does not print the warning '{warning}'"
    if job.code != 0:
        name = next((name for name, values in job.results.items() if values is None), "the end")
        yield f"{name} ends with code {job.code}:\n    " + "\n    ".join(job.output[-15:])


def difference(expected, actual):
    """Returns the largest difference relative to values above 1, and the name of the result."""
    if expected.keys() != actual.keys():
        return math.inf, f"names {sorted(expected.keys() ^ actual.keys())}"
    worst = (0.0, "")
    for name, values in expected.items():
        if len(values) != len(actual[name]):
            return math.inf, f"{name}: {len(actual[name])} numbers instead of {len(values)}"
        for i, (a, b) in enumerate(zip(values, actual[name])):
            one = abs(a - b) / max(1.0, abs(a))
            worst = max(worst, (math.inf if math.isnan(one) else one, f"{name}[{i}]: {b} instead of {a}"))
    return worst


def check_results(job, ranks, references, programs):
    """Yields which results are wrong."""
    for name, values in job.results.items():
        program = programs[name]
        expected = references.get(program.reference)
        if values is None or expected is None:
            continue  # reported as a failure of the job
        largest, where = difference(expected, values)
        if not program.must_differ:
            if not largest <= program.tolerance:
                yield f"{name} differs by {largest:.3g}, tolerance {program.tolerance:g}: {where}"
        elif ranks > 1 and largest < 1e-3:
            yield f"{name} equals one rank although it does not average"


def check_reference(results):
    """Yields which trainings on one rank prove nothing, because the loss does not change."""
    for name, values in results.items():
        for key, losses in (values or {}).items():
            if key.endswith("loss") and len(losses) > 1 and max(losses) - min(losses) < 1e-3:
                yield f"{name}: {key} does not change: {losses}"


def choose_programs(args, ranks, transport, programs):
    names = args.programs or list(programs)
    if ranks == 1:
        return list(dict.fromkeys([programs[name].reference for name in names] + names))
    return names[TRANSPORTS.index(transport) % args.sample :: 1 if transport == "shm" else args.sample]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--separate", action="store_true")
    parser.add_argument("--sample", type=int, default=1, metavar="N")
    parser.add_argument("--programs", nargs="+", default=[])
    args = parser.parse_args()
    programs = list_programs(args.program)

    num_mistakes = 0
    references = {}
    for ranks, transport in [(1, "self"), *((n, t) for n in args.ranks for t in args.transports)]:
        start = time.monotonic()
        jobs = run_all(args, ranks, transport, choose_programs(args, ranks, transport, programs))
        mistakes = []
        for job in jobs:
            if ranks == 1:
                references.update(job.results)
                mistakes += check_reference(job.results)
        for job in jobs:
            mistakes += check_output(job, ranks, programs)
            mistakes += check_results(job, ranks, references, programs)
        for text in mistakes:
            print(f"  {transport} n{ranks}: {text}")
        num_mistakes += len(mistakes)
        passed = sum(values is not None for job in jobs for values in job.results.values())
        seconds = time.monotonic() - start
        print(f"{transport} n{ranks}: {passed} programs in {seconds:.1f} s, {len(mistakes)} mistakes", flush=True)
    return 1 if num_mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
