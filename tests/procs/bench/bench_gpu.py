#!/usr/bin/env python3
"""Tests bench/gpu.py on a CPU: equal results in C++ and Python, its rows, lack of memory, and the error without a GPU.

Usage: bench_gpu.py --gpu PATH --bin FOLDER [--python PATH]
The comparison with Python is skipped without a Python that has torch.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

PARAMETERS = {"gpt": 29216, "resnet50": 11181642}
# Largest differences of losses after updates, which round differently. With bfloat16, a layer that adds its bias in a
# separate pass has a difference of 8e-4.
MAX_DIFFERENCE = {"32": 1e-6, "bf16-mixed": 3e-4}
STEP = {
    "what",
    "impl",
    "model",
    "precision",
    "batch",
    "device",
    "libtorch",
    "parameters",
    "ms",
    "min_ms",
    "runs",
    "ratio",
    "ratio_to",
    "peak_bytes",
    "reserved_bytes",
    "losses",
    "apart",
    "equal",
}


def fail(text):
    sys.exit(f"bench_gpu: {text}")


def gpu(args, *words, expect=0):
    """Runs bench/gpu.py, which must exit with `expect`. Returns its rows and its stderr."""
    with tempfile.TemporaryDirectory() as folder:
        json_file = pathlib.Path(folder) / "lines"
        done = subprocess.run(
            [
                sys.executable,
                args.gpu,
                "--bin",
                args.bin,
                f"--python={args.python}",
                "--tiny",
                "--rounds",
                "2",
                "--steps",
                "2",
                "--json",
                str(json_file),
                *words,
            ],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        if done.returncode != expect:
            fail(f"{words} exited with {done.returncode}:\n{done.stderr}{done.stdout}")
        if expect == 0 and [json.loads(line) for line in json_file.read_text().splitlines()] != rows:
            fail("--json differs from stdout")
    return rows, done.stderr


def check_steps(rows, precision, impls):
    rows = [row for row in rows if row["precision"] == precision]
    for model, parameters in PARAMETERS.items():
        compared = [row for row in rows if row["model"] == model]
        if [row["impl"] for row in compared] != impls:
            fail(f"{model}, {precision}: the implementations are {[row['impl'] for row in compared]}, not {impls}")
        for row in compared:
            if (
                not row.keys() >= STEP
                or row["parameters"] != parameters
                or row["device"] != "cpu"
                or row["ratio_to"] != impls[0]
                or row["runs"] != 2
            ):
                fail(f"an invalid row: {row}")
            if (
                not 0 < row["min_ms"] <= row["ms"] < 60000
                or not 1 << 20 < row["peak_bytes"] <= row["reserved_bytes"]
                or row["equal"] is not True
            ):
                fail(f"a row with invalid numbers: {row}")
            # With the same libtorch, weights and data, the first forward has the same bits in C++ and Python.
            if (
                row["losses"][0] != compared[0]["losses"][0]
                or len(set(row["losses"])) != 3
                or row["apart"] > MAX_DIFFERENCE[precision]
            ):
                fail(
                    f"{precision}: the losses of {impls[0]} are {compared[0]['losses']}, "
                    f"and those of {row['impl']} are {row['losses']}"
                )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--python", default="")
    args = parser.parse_args()

    impls = ["lockstep", "lockstep-fused"] + (["pytorch-ddp", "pytorch-ddp-fused"] if args.python else [])
    rows, err = gpu(
        args, "--device", "cpu", "--parts", "step,ranks", "--precisions", "32,bf16-mixed", "--impl", ",".join(impls)
    )
    steps = [row for row in rows if row["what"] == "gpu_step"]
    for precision in ("32", "bf16-mixed"):
        check_steps(steps, precision, impls)
        if f"parameters), {precision}, batch 4, cpu" not in err:
            fail(f"no table of {precision}:\n{err}")
    ranks = [row for row in rows if row["what"] == "gpu_ranks"]
    if [row["model"] for row in ranks] != list(PARAMETERS) or any(
        row["ranks"] != 2 or row["transport"] != "gloo" or row["equal"] is not True for row in ranks
    ):
        fail(f"two ranks: {ranks}")
    if not args.python:
        print("no Python with torch: the comparison with Python was skipped")

    # The largest batch within a limit of memory, to a sixteenth.
    rows, _ = gpu(
        args,
        "--device",
        "cpu",
        "--parts",
        "batch",
        "--models",
        "gpt",
        "--levels",
        "O0",
        "--impl",
        "lockstep",
        "--memory-limit",
        "160",
    )
    if len(rows) != 1 or not 0 < rows[0]["batch"] < rows[0]["more_than"] <= max(
        rows[0]["batch"] + 1, rows[0]["batch"] * 17 / 16
    ):
        fail(f"the largest batch: {rows}")
    rows, _ = gpu(
        args,
        "--device",
        "cpu",
        "--parts",
        "batch",
        "--models",
        "gpt",
        "--levels",
        "O0",
        "--impl",
        "lockstep",
        "--memory-limit",
        "4000",
        "--most-samples",
        "4",
    )
    if rows[0]["batch"] != 4 or rows[0]["more_than"] is not None:
        fail(f"the largest batch with --most-samples: {rows}")
    rows, err = gpu(args, "--device", "cpu", "--parts", "batch", "--models", "gpt")
    if rows[0]["what"] != "not_measured" or "--memory-limit" not in err:
        fail(f"a search without a limit: {rows}")

    rows, err = gpu(args, "--device", "cpu", "--parts", "step", "--impl", "unknown", expect=2)
    if "unknown" not in err or "lockstep-fused" not in err:
        fail(f"an unknown implementation: {err}")
    if (
        subprocess.run(
            [str(pathlib.Path(args.bin) / "bench_gpu_step"), "lockstep", "gpt", "tiny", "32", "1", "cuda", "1", "1"],
            capture_output=True,
            check=False,
        ).returncode
        == 0
    ):
        print("there is a GPU: the error without one was skipped")
        return
    rows, err = gpu(args, "--device", "cuda", expect=1)
    if rows or len(err.splitlines()) != 1 or "--device is cuda, which is not available" not in err or "GPU" not in err:
        fail(f"the error without a GPU is: {err}{rows}")


main()
