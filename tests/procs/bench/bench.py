#!/usr/bin/env python3
"""Tests `lockstep bench`: its options, its output as JSON, and all implementations that this machine has.

Usage: bench.py --lockstep PATH --baselines FOLDER [--python PATH]
The models of the baselines in Python must have as many parameters as those in C++; this is skipped without a Python
that has torch. Fails if a measurement leaves a process or a file.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

PARAMETERS = {"mlp-50m": 50343936, "mlp-65m": 65561600, "mlp-6m": 6297600, "transformer-2m": 1902976, "cnn-1m": 1097610}
MARK = "LOCKSTEP_TEST_BENCH"
ROW = {"what", "impl", "ranks", "hosts", "median_s", "min_s", "runs", "spread", "ratio", "ratio_to", "noisy"}


def fail(text):
    sys.exit(f"bench: {text}")


def tagged_processes(mark):
    """Returns the command lines of the processes of a measurement."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def bench(args, *words, expect=0):
    """Runs `lockstep bench`, which must exit with `expect`. Returns its rows and its stderr."""
    mark = f"{os.getpid()}.{words}"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [args.lockstep, "bench", *words, "--json"],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, MARK: mark, "TMPDIR": folder},
        )
        # torch itself, and torchrun, leave a folder.
        files = [name for name in os.listdir(folder) if not name.startswith(("torchinductor", "torchelastic"))]
    if done.returncode != expect:
        fail(f"{words} exited with {done.returncode}:\n{done.stderr}")
    if tagged_processes(mark) or files:
        fail(f"{words} left {tagged_processes(mark)} {files}")
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def check_rows(rows, what, impls):
    """Checks rows of JSON. Returns them without the first one, which describes the machine."""
    if rows[0]["what"] != "machine" or rows[0]["cores"] != os.cpu_count():
        fail(f"the first line does not describe this machine: {rows[0]}")
    rows = rows[1:]
    if [row["impl"] for row in rows][: len(impls)] != impls:
        fail(f"the implementations are {[row['impl'] for row in rows]}, not {impls}")
    for row in rows:
        if (
            not row.keys() >= ROW
            or row["what"] != what
            or not 0 < row["min_s"] <= row["median_s"] < 60
            or row["ratio_to"] != impls[0]
        ):
            fail(f"an invalid row: {row}")
    if rows[0]["ratio"] != 1:
        fail(f"the ratio of the first implementation is not 1: {rows[0]}")
    return rows


def check_python_models(args):
    program = (
        f"import models\nfor name in {list(PARAMETERS)!r}:\n"
        "  print(name, sum(p.numel() for p in models.make_task(name)[0].parameters()))"
    )
    output = subprocess.run(
        [args.python, "-c", program],
        cwd=args.baselines,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    ).stdout
    counts = {name: int(count) for name, count in map(str.split, output.splitlines())}
    if counts != PARAMETERS:
        fail(f"the models in Python have {counts} parameters")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("--baselines", required=True)
    parser.add_argument("--python", default="")
    args = parser.parse_args()

    rows, err = bench(args, "all-reduce", "-n", "2", "--size", "4K,1M", "--rounds", "1")
    rows = check_rows(rows, "all_reduce", ["lockstep", "lockstep-ordinary", "gloo"])
    print("all-reduce beside", sorted({row["impl"] for row in rows}))
    if {row["bytes"] for row in rows} != {4096, 1 << 20} or not all(
        "ratio_to_memcpy" in row for row in rows if row["bytes"] == 1 << 20
    ):
        fail(f"the sizes or the ratio to memcpy are missing: {rows}")
    if (
        not any(row["impl"].startswith(("openmpi", "mpich", "intel")) for row in rows)
        and "not measured: MPI" not in err
    ):
        fail(f"there is no row of MPI, and no message about it: {err}")

    impls = ["lockstep", "unsynchronised-tuned", "reducer"] + (["pytorch-ddp"] if args.python else [])
    python = ["--python", args.python] if args.python else []
    rows, _ = bench(
        args, "step", "--model", "cnn-1m", "--optimizer", "adamw", "--rounds", "1", "--impl", ",".join(impls), *python
    )
    for row in check_rows(rows, "step", impls):
        if row["parameters"] != PARAMETERS["cnn-1m"] or row["optimizer"] != "adamw":
            fail(f"a row of another model or optimizer: {row}")

    bench(args, "all-reduce", "--size", "4K", "--impl", "unknown", expect=64)
    if args.python:
        check_python_models(args)
    else:
        print("no Python with torch: PyTorch's DDP and the models in Python were skipped")


main()
