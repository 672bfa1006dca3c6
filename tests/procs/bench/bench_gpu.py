#!/usr/bin/env python3
"""bench/gpu.py on a CPU: C++ and Python compute the same, the lines say what they should, memory that ends is no error, and a GPU that is not there is one line.

usage: bench_gpu.py --gpu PATH --bin FOLDER [--python PATH]
Without a python that has torch what it would be compared with is left out, and said.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

PARAMETERS = {"gpt": 29216, "resnet50": 11181642}
# Of losses after updates, which round differently. A layer that adds its bias in a pass of its own is 8e-4 away with bfloat16.
APART = {"32": 1e-6, "bf16-mixed": 3e-4}
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
    with tempfile.TemporaryDirectory() as folder:
        kept = pathlib.Path(folder) / "lines"
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
                str(kept),
                *words,
            ],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        if done.returncode != expect:
            fail(f"{words} ended with {done.returncode}:\n{done.stderr}{done.stdout}")
        if expect == 0 and [json.loads(line) for line in kept.read_text().splitlines()] != rows:
            fail("--json has other lines than the screen")
    return rows, done.stderr


def check_steps(rows, precision, impls):
    same = [row for row in rows if row["precision"] == precision]
    for model, parameters in PARAMETERS.items():
        race = [row for row in same if row["model"] == model]
        if [row["impl"] for row in race] != impls:
            fail(f"{model}, {precision}: the implementations are {[row['impl'] for row in race]}, not {impls}")
        for row in race:
            if (
                not row.keys() >= STEP
                or row["parameters"] != parameters
                or row["device"] != "cpu"
                or row["ratio_to"] != impls[0]
                or row["runs"] != 2
            ):
                fail(f"a line is wrong: {row}")
            if (
                not 0 < row["min_ms"] <= row["ms"] < 60000
                or not 1 << 20 < row["peak_bytes"] <= row["reserved_bytes"]
                or row["equal"] is not True
            ):
                fail(f"a line's numbers are wrong: {row}")
            # The same libtorch, weights and data: the first forward has the same bits whoever calls it.
            if (
                row["losses"][0] != race[0]["losses"][0]
                or len(set(row["losses"])) != 3
                or row["apart"] > APART[precision]
            ):
                fail(
                    f"{precision}: the losses of {impls[0]} are {race[0]['losses']}, and these are {row['impl']}'s: {row['losses']}"
                )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--python", default="")
    args = parser.parse_args()

    impls = ["lockstep", "lockstep-fused"] + (["pytorch-ddp", "pytorch-ddp-fused"] if args.python else [])
    rows, said = gpu(
        args, "--device", "cpu", "--parts", "step,ranks", "--precisions", "32,bf16-mixed", "--impl", ",".join(impls)
    )
    steps = [row for row in rows if row["what"] == "gpu_step"]
    for precision in ("32", "bf16-mixed"):
        check_steps(steps, precision, impls)
        if f"parameters), {precision}, batch 4, cpu" not in said:
            fail(f"no table of {precision}:\n{said}")
    ranks = [row for row in rows if row["what"] == "gpu_ranks"]
    if [row["model"] for row in ranks] != list(PARAMETERS) or any(
        row["ranks"] != 2 or row["transport"] != "gloo" or row["equal"] is not True for row in ranks
    ):
        fail(f"two ranks: {ranks}")
    if not args.python:
        print("no python with torch: the same in Python was left out")

    # A limit that the process comes to: found, and no more than a sixteenth away from it.
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
        fail(f"the largest batch that was asked for: {rows}")
    rows, said = gpu(args, "--device", "cpu", "--parts", "batch", "--models", "gpt")
    if rows[0]["what"] != "not_measured" or "--memory-limit" not in said:
        fail(f"a search without an end: {rows}")

    rows, said = gpu(args, "--device", "cpu", "--parts", "step", "--impl", "somebody", expect=2)
    if "somebody" not in said or "lockstep-fused" not in said:
        fail(f"a wrong word: {said}")
    if (
        subprocess.run(
            [str(pathlib.Path(args.bin) / "bench_gpu_step"), "lockstep", "gpt", "tiny", "32", "1", "cuda", "1", "1"],
            capture_output=True,
            check=False,
        ).returncode
        == 0
    ):
        print("there is a GPU: what is said without one was left out")
        return
    rows, said = gpu(args, "--device", "cuda", expect=1)
    if rows or len(said.splitlines()) != 1 or "--device is cuda, which is not here" not in said or "GPU" not in said:
        fail(f"no GPU, and what is said is: {said}{rows}")


main()
