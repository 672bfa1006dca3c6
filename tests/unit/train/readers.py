"""readers.py CASE SAMPLES DEPS: the files that the program SAMPLES writes are read by those whom users read them with. 77: one of them is not on this machine."""

import csv
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

SKIPPED = 77


def check(got, want, what):
    if got != want:
        sys.exit(f"{what}: got {got!r}, want {want!r}")


def tensorboard(samples, deps, folder):
    """TensorBoard's own reader, once with its fall-back in Python and once with the server that the program tensorboard uses."""
    python = deps / "tensorboard/bin/python"
    if not python.exists():
        sys.exit(SKIPPED)
    subprocess.run([samples, "values", folder], check=True)
    script = pathlib.Path(__file__).with_name("read_events.py")
    sys.exit(subprocess.run([python, "-W", "ignore", script, folder]).returncode)


def tables(samples, _, folder):
    """csv and json of Python's library."""
    subprocess.run([samples, "values", folder], check=True)
    with open(pathlib.Path(folder) / "metrics.csv", newline="", encoding="utf-8", errors="surrogateescape") as file:
        rows = list(csv.DictReader(file, strict=True, restkey="too many", restval="too few"))
    check([row["step"] for row in rows], [str(step) for step in range(12)], "steps of the table")
    check(list(rows[0])[:4], ["step", "time", "train/loss", "learning rate"], "columns")
    check([float(row["train/loss"]) for row in rows[:10]], [10, 9, 8, 7, 6, 5, 106, 107, 108, 109], "losses")
    check(rows[0]["learning rate"], "", "a number that was not there yet")
    check(rows[10]['a,"b"'], "inf", "infinity")
    check(math.isnan(float(rows[10]["odd"])), True, "a NaN")
    check(float(rows[11]["tiny"]), 1e-310, "a small number")
    check([row for row in rows if "too many" in row or "too few" in row.values()], [], "rows of another length")

    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    with open(pathlib.Path(folder) / "metrics.jsonl", encoding="utf-8") as file:
        lines = [json.loads(line, parse_constant=refuse) for line in file]
    check([line["step"] for line in lines], [*range(12), 3, 4, 5], "steps of the lines")
    check(lines[9]["train/loss"], 109, "a loss")
    check(lines[10]["odd"], "NaN", "a NaN")
    check(lines[10]["bad \ufffd utf-8"], "-Infinity", "an infinity")
    check(lines[12]["text"], {"sample": "first line\nsecond: \u2713 \ufffd <b>"}, "the text")
    check(lines[13]["histogram"]["fc.weight"]["nan"], 1, "NaN in a histogram")
    check(sum(lines[13]["histogram"]["fc.weight"]["counts"]), 1000, "numbers in a histogram")


if __name__ == "__main__":
    case, program, deps_folder = sys.argv[1:]
    with tempfile.TemporaryDirectory() as work:
        {"tensorboard": tensorboard, "tables": tables}[case](program, pathlib.Path(deps_folder), os.path.join(work, "runs/x"))
