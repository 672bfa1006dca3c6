#!/usr/bin/env python3
"""Tests bench/gpu/proof.py on a CPU: every stage runs and writes its rows, a call that was cut off is resumed, what the
machine lacks is refused with a reason, and the page is written.

Usage: gpu_proof.py --build FOLDER [--python PATH]
The comparison with Python is skipped without a Python that has torch.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
PROOF = ROOT / "bench/gpu/proof.py"
STAGES = ["build", "suites", "step", "memory", "ranks", "failures", "data", "dp", "torch"]
UNFINISHED = 3


def fail(text):
    sys.exit(f"gpu_proof: {text}")


def words(args, out, *more):
    options = ["--device", "cpu", "--tiny", "--build", args.build, f"--python={args.python}", "--jobs", "2"]
    return [sys.executable, str(PROOF), "--out", str(out), *options, *more]


def run(args, out, *more, expect):
    done = subprocess.run(words(args, out, *more), capture_output=True, text=True, timeout=800, check=False)
    if done.returncode not in expect:
        fail(f"{more} exited with {done.returncode}, not {expect}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def read(out):
    """Returns the rows by stage and name. No name may have two."""
    found = {}
    for line in (out / "results.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["what"] == "row" and row["stage"] != "build":  # the stage build runs in every call
            if (row["stage"], row["row"]) in found:
                fail(f"{row['stage']}: {row['row']} has two results")
            found[row["stage"], row["row"]] = row
    return found


def cut_off(args, out):
    """Begins a proof and kills it after its first rows."""
    process = subprocess.Popen(
        words(args, out, "--stages", "suites"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    results = out / "results.jsonl"
    end = time.monotonic() + 120
    while not results.exists() or results.read_text().count('"what": "row"') < 2:
        if time.monotonic() > end or process.poll() is not None:
            fail(f"no rows within 120 s; exit code {process.poll()}")
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with results.open("a") as file:
        file.write('{"what": "row", "stage": "sui')  # as when the machine is lost while a row is written


def check_rows(args, rows):
    for (stage, name), row in rows.items():
        if row["outcome"] == "refused" and not row["why"]:
            fail(f"{stage}: {name} was refused without a reason")
        needs_gpu = ("compute-sanitizer", "overlap of ", "losses of 2 ranks over NCCL", "CUDA graph")
        refused = name.startswith(needs_gpu)
        if row["outcome"] != ("refused" if refused else "done"):
            fail(f"{stage}: {name}: {row['outcome']}: {row.get('why')}")
    steps = [row for (stage, _), row in rows.items() if stage == "step"]
    if len(steps) != 5:
        fail(f"{len(steps)} rows of steps; expected 5")
    for row in steps:
        first = row["impls"][row["ratio_to"]]
        for impl, one in row["impls"].items():
            # With the same libtorch, weights and data, the first forward has the same bits in C++ and Python, unless
            # it is compiled: then fewer results are rounded to bfloat16.
            same = one["losses"][0] == first["losses"][0] or impl in ("pytorch-compile", "pytorch-overhead")
            if not same or len(set(one["losses"])) != 3:
                fail(f"{row['row']}: losses of {impl} are {one['losses']}, not {first['losses']}")
            if not 0 < one["min_ms"] <= one["ms"] or not one["peak_bytes"]:
                fail(f"{row['row']}: invalid numbers of {impl}: {one}")
        if "lockstep-fused" not in row["impls"]:
            fail(f"{row['row']} has no lockstep-fused: {row['not_measured']}")
    for row in (row for (stage, _), row in rows.items() if stage == "memory"):
        if not row["levels"]["O0"]["batch"] or not row["levels"]["O1"]["batch"]:
            fail(f"memory: no batch fits: {row}")
    suites = [row for (stage, _), row in rows.items() if stage in ("suites", "ranks") and row["outcome"] == "done"]
    if not all(row["tests"] > 0 for row in suites if "tests" in row):
        fail("a suite ran no tests")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--python", default="")
    args = parser.parse_args()
    if not args.python:
        print("SKIPPED: there is no Python with torch to compare with")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as name:
        out = pathlib.Path(name)
        cut_off(args, out)
        before = read_before(out)
        run(args, out, "--resume", "--limit", "60", expect=[UNFINISHED])
        run(args, out, "--resume", "--limit", "700", expect=[0])
        rows = read(out)
        for key, row in before.items():
            if rows[key] != row:
                fail(f"{key} was measured again")
        if {stage for stage, _ in rows} != set(STAGES) - {"build"}:
            fail(f"stages: {sorted({stage for stage, _ in rows})}")
        check_rows(args, rows)
        heads = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines() if '"head"' in line]
        if not all({"source", "gpu", "driver", "kernel", "libtorch", "nccl", "lacks"} <= head.keys() for head in heads):
            fail(f"a head is not complete: {heads}")
        if not (out / "logs.tar.gz").exists():
            fail("there is no archive of logs")
        page = out / "page.md"
        subprocess.run([sys.executable, PROOF.parent / "page.py", out / "results.jsonl", page], check=True, timeout=60)
        text = page.read_text()
        for expected in ("## Training steps beside PyTorch", "lockstep-graph", "## Failures", "SIGSTOP", "cpu"):
            if expected not in text:
                fail(f"the page has no {expected}:\n{text}")
        # Rows of other sources do not count.
        lines = (out / "results.jsonl").read_text().replace(heads[0]["source"], "0" * 16)
        (out / "results.jsonl").write_text(lines)
        said = run(args, out, "--resume", "--stages", "dp", expect=[0])
        if "dp: memory by device: done" not in said:
            fail(f"a row of other sources was kept:\n{said}")
    done = subprocess.run(
        [sys.executable, str(PROOF), "--out", os.devnull + "-x", "--stages", "unknown"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 2 or "unknown" not in done.stderr:
        fail(f"an unknown stage: {done}")


def read_before(out):
    lines = (out / "results.jsonl").read_text().splitlines()[:-1]
    rows = [json.loads(line) for line in lines]
    return {(row["stage"], row["row"]): row for row in rows if row["what"] == "row" and row["stage"] != "build"}


main()
