#!/usr/bin/env python3
"""Writes docs/benchmarks-gpu.md from the results file of proof.py.

Usage: page.py RESULTS [PAGE]. Rows that failed or were refused are in the page, with the reason.
"""

import pathlib
import sys

from machine import ROOT
from results import is_same, read_rows

FACTS = (
    "tests",
    "skipped",
    "nccl",
    "tool",
    "build_seconds",
    "apart",
    "share_while_computing",
    "transport",
    "seconds_after_the_fault",
    "replays",
    "ratio",
)


def number(value, form="{:.2f}"):
    return "-" if value is None else form.format(value)


def mebibytes(value):
    return "-" if not value else f"{value / (1 << 20):,.0f}"


def table(header, rows):
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(str(entry) for entry in row) + " |"
    yield ""


def why(row):
    return str(row.get("why", "")).replace("|", "/").replace("\n", " ")[:300]


def write_step(rows):
    yield "With one rank, the rows pytorch-ddp* and lockstep-nccl send gradients through NCCL; lockstep, lockstep-fused"
    yield "and lockstep-graph send nothing, and pytorch-graph has no DistributedDataParallel. Medians of turns."
    yield ""
    for row in rows:
        if "impls" not in row:
            continue
        yield f"{row['model']}, {row['precision']}, batch {row['batch']}, {row['parameters']:,} parameters"
        yield ""
        yield from table(
            ["", "median ms", f"ratio to {row['ratio_to']}", "waits per step", "peak MiB", "loss difference"],
            [
                [
                    impl,
                    number(one["ms"]),
                    number(one["ratio"], "{:.3f}"),
                    number(one["synchronizations"], "{:g}"),
                    mebibytes(one["peak_bytes"]),
                    number(one["apart"], "{:.1e}"),
                ]
                for impl, one in row["impls"].items()
            ],
        )
        for impl, reason in row["not_measured"].items():
            yield f"Not measured: {impl}: {reason}"
            yield ""


def write_memory(rows):
    entries = []
    for row in (row for row in rows if "levels" in row):
        o0, o1 = row["levels"]["O0"], row["levels"]["O1"]
        entries.append(
            [row["model"], row["impl"], o0["batch"], o1["batch"], number(row.get("batch_O1_to_O0")),
             mebibytes(o0["peak_bytes"]), mebibytes(o1["peak_bytes_at_batch_of_O0"]),
             number(row.get("peak_O1_to_O0"))]
        )  # fmt: skip
    header = ["model", "", "largest batch O0", "O1", "factor", "peak MiB O0", "O1 at the same batch", "ratio"]
    yield from table(header, entries)


def write_failures(rows):
    yield from table(
        ["fault", "cause", "good", "runs", "slowest end, s", "GPU memory left, MiB"],
        [
            [row["fault"], row["cause"], row["good"], row["runs"], number(max(row["ended_seconds"], default=None)),
             mebibytes(row.get("gpu_memory_left_bytes"))]
            for row in rows
            if "fault" in row
        ],
    )  # fmt: skip


def write_data(rows):
    entries = []
    for row in sorted((row for row in rows if "lockstep" in row), key=lambda row: row["workers"]):
        other = row.get("pytorch", {})
        entries.append(
            [row["workers"], number(row["lockstep"]["images_per_second"], "{:.0f}"),
             number(row["lockstep"]["gpu_busy"]), other.get("loader", "-"),
             number(other.get("images_per_second"), "{:.0f}"), number(other.get("gpu_busy"))]
        )  # fmt: skip
    yield "Whole epochs after the first, Lockstep's with a validation of 8 images."
    yield ""
    header = ["workers", "Lockstep, images/s", "GPU busy", "beside", "images/s", "GPU busy"]
    yield from table(header, entries)


def write_plain(rows):
    entries = []
    for row in rows:
        facts = {key: row[key] for key in FACTS if key in row}
        if "apart" in facts:
            facts["apart"] = number(facts["apart"], "{:.1e}")
        entries.append([row["row"], row["outcome"], ", ".join(f"{key} {value}" for key, value in facts.items())])
    yield from table(["", "outcome", ""], entries)


def write_dp(rows):
    for row in rows:
        if "table" in row:
            yield "```"
            yield from row["table"]
            yield "```"
            yield ""


SECTIONS = {
    "build": ("Build", write_plain),
    "suites": ("Test suites on the device", write_plain),
    "step": ("Training steps beside PyTorch", write_step),
    "memory": ("Largest batch and peak of memory", write_memory),
    "ranks": ("Several ranks on one GPU over NCCL", write_plain),
    "failures": ("Failures", write_failures),
    "data": ("JPEG files", write_data),
    "dp": ("DataParallel", write_dp),
    "torch": ("Python programs", write_plain),
}


def last_rows(path):
    """Returns the last head, and the last row of each name of the same sources and kind of machine."""
    lines = list(read_rows(path))
    heads = [row for row in lines if row["what"] == "head"]
    if not heads:
        sys.exit(f"page.py: {path} has no head")
    rows, same = {}, False
    for row in lines:
        if row["what"] == "head":
            same = is_same(row, heads[-1])
        elif same:
            rows[row["stage"], row["row"]] = row
    return heads[-1], rows


def page(path):
    head, rows = last_rows(path)
    yield "# Measured on a GPU"
    yield ""
    yield f"{head['gpu']}, driver {head['driver']}, {head['cpus']} CPU cores, {head['kernel']}, libtorch"
    yield f"{head['libtorch']}, NCCL {head['nccl']}, {head['compiler']}. Sources {head['source']}, commit"
    yield f"{head['commit']}."
    yield "Written by `bench/gpu/page.py` from the results of `make gpu-proof`."
    yield ""
    if head["lacks"]:
        yield "The machine lacks: " + "; ".join(f"{name} ({reason})" for name, reason in head["lacks"].items()) + "."
        yield ""
    for stage, (title, write) in SECTIONS.items():
        found = [row for (name, _), row in rows.items() if name == stage]
        if not found:
            continue
        yield f"## {title}"
        yield ""
        yield from write(found)
        for row in found:
            if row["outcome"] != "done" and write is not write_plain:
                yield f"{row['row']}: {row['outcome']}: {why(row)}"
                yield ""


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    target = pathlib.Path(sys.argv[2]) if len(sys.argv) == 3 else ROOT / "docs/benchmarks-gpu.md"
    target.write_text("\n".join(page(sys.argv[1])).rstrip() + "\n", encoding="utf-8")


main()
