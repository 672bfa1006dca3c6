#!/usr/bin/env python3
"""`lockstep bench` from its command line to its lines of JSON, with every implementation that this machine has.

usage: bench.py --lockstep PATH --peers FOLDER [--python PATH]
The peers' models in Python are compared with those of C++ by their numbers of parameters. Without a python that has torch that is left out,
and said. Fails when a process or a folder of the measurement is left.
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


def left(mark):
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def bench(args, *words, expect=0):
    mark = f"{os.getpid()}.{words}"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [args.lockstep, "bench", *words, "--json"],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, MARK: mark, "TMPDIR": folder},
        )
        rest = [
            name for name in os.listdir(folder) if not name.startswith("torchinductor")
        ]  # torch leaves that everywhere
    if done.returncode != expect:
        fail(f"{words} ended with {done.returncode}:\n{done.stderr}")
    if left(mark) or rest:
        fail(f"{words} left {left(mark)} {rest}")
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def check_rows(rows, what, impls):
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
            fail(f"a line is wrong: {row}")
    if rows[0]["ratio"] != 1:
        fail(f"the first is not as fast as itself: {rows[0]}")
    return rows


def check_python_models(args):
    program = (
        f"import models\nfor name in {list(PARAMETERS)!r}:\n"
        "  print(name, sum(p.numel() for p in models.make_task(name)[0].parameters()))"
    )
    said = subprocess.run(
        [args.python, "-c", program],
        cwd=args.peers,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    ).stdout
    counts = {name: int(count) for name, count in map(str.split, said.splitlines())}
    if counts != PARAMETERS:
        fail(f"the models in Python have {counts} parameters")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("--peers", required=True)
    parser.add_argument("--python", default="")
    args = parser.parse_args()

    rows, said = bench(args, "all-reduce", "-n", "2", "--size", "4K,1M", "--rounds", "1")
    rows = check_rows(rows, "all_reduce", ["lockstep", "lockstep-ordinary", "gloo"])
    print("all-reduce beside", sorted({row["impl"] for row in rows}))
    if {row["bytes"] for row in rows} != {4096, 1 << 20} or not all(
        "ratio_to_memcpy" in row for row in rows if row["bytes"] == 1 << 20
    ):
        fail(f"the sizes or the yardstick are missing: {rows}")
    if (
        not any(row["impl"].startswith(("openmpi", "mpich", "intel")) for row in rows)
        and "not measured: MPI" not in said
    ):
        fail(f"no MPI, and nobody says so: {said}")

    impls = ["lockstep", "unsynchronised-tuned", "reducer"] + (["pytorch-ddp"] if args.python else [])
    python = ["--python", args.python] if args.python else []
    rows, _ = bench(
        args, "step", "--model", "cnn-1m", "--optimizer", "adamw", "--rounds", "1", "--impl", ",".join(impls), *python
    )
    for row in check_rows(rows, "step", impls):
        if row["parameters"] != PARAMETERS["cnn-1m"] or row["optimizer"] != "adamw":
            fail(f"not the model that was asked for: {row}")

    bench(args, "all-reduce", "--size", "4K", "--impl", "nobody", expect=64)
    if args.python:
        check_python_models(args)
    else:
        print("no python with torch: PyTorch's DDP and the models in Python were left out")


main()
