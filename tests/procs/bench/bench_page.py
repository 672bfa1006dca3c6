#!/usr/bin/env python3
"""Tests bench/make_page.py with given rows: the page, its plots, and the comparison with the targets.

Usage: bench_page.py --bench FOLDER
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

MACHINE = {
    "what": "machine",
    "cpu": "Test CPU",
    "cores": 2,
    "memory_bytes": 8 << 30,
    "kernel": "6.1",
    "libtorch": "2.11.0",
    "compiler": "GNU 12",
    "lockstep": "0.1.0",
    "load_before": "0.01",
}


def row(impl, ratio, what="all_reduce", first="lockstep", **more):
    return {
        "what": what,
        "impl": impl,
        "ranks": 2,
        "hosts": 1,
        **more,
        "median_s": 0.01 * ratio,
        "min_s": 0.009 * ratio,
        "runs": 21,
        "spread": 0.01,
        "ratio": ratio,
        "ratio_to": first,
        "noisy": impl == "gloo",
    }


LINES = [
    MACHINE,
    *(
        row(impl, ratio, bytes=250 << 20, ratio_to_memcpy=ratio / 2, bandwidth=4e10)
        for impl, ratio in (("lockstep", 1), ("gloo", 13), ("openmpi-4.1.4", 8), ("memcpy", 2))
    ),
    *(row(impl, ratio, bytes=4096) for impl, ratio in (("lockstep", 1), ("openmpi-4.1.4", 2))),
    *(
        row(impl, ratio, what="step", model="cnn-1m", optimizer="sgd", parameters=1097610, bandwidth=4e10)
        for impl, ratio in (
            ("lockstep-fused", 1),
            ("lockstep", 1.1),
            ("unsynchronised-tuned", 1.05),
            ("pytorch-ddp", 1.25),
        )
    ),
]
TARGETS = {
    "250M: time relative to memcpy on both cores: 0.500": "holds",
    "250M: time of gloo relative to Lockstep: 13.000": "holds",
    "250M: time of openmpi-4 relative to Lockstep: 8.000": "MISSED",
    "4K: time relative to Open MPI 4.1: 0.500": "holds",
    "step cnn-1m, fused: time relative to unsynchronised ranks: 0.952": "holds",
    "step cnn-1m, torch's SGD: time relative to unsynchronised ranks: 1.048": "holds",
    "step cnn-1m: time of PyTorch's DDP relative to the fused step: 1.250": "MISSED",
    "250M: time of mpich relative to Lockstep: not measured": "-",
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bench", required=True, type=pathlib.Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        docs, source = pathlib.Path(folder), pathlib.Path(folder) / "lines"
        source.write_text("".join(json.dumps(line) + "\n" for line in LINES))
        output = subprocess.run(
            [sys.executable, "-B", args.bench / "make_page.py", "--from", source, "--out", docs],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout
        page = (docs / "benchmarks.md").read_text()
        plots = sorted(docs.glob("benchmarks/*.svg"))
        for plot in plots:
            xml.etree.ElementTree.parse(plot)
        drawn = {plot.name: plot.read_text() for plot in plots}
    for words in (
        "Test CPU, 2 cores, 8 GiB",
        "| gloo (noisy) | 130 ms | 117 ms | 1.0 % | 13.000 | 6.500 |",
        "2 ranks, 250M. Memory: 40 GB/s",
        "cnn-1m (1,097,610 parameters), sgd, 2 ranks",
        "| pytorch-ddp | 12.5 ms | 11.2 ms | 1.0 % | 1.250 |",
    ):
        if words not in page:
            sys.exit(f"the page lacks '{words}':\n{page}")
    if (
        set(drawn) != {"all_reduce_2.svg", "step.svg"}
        or "openmpi-4.1.4" not in drawn["all_reduce_2.svg"]
        or "1.25  (12 ms)" not in drawn["step.svg"]
    ):
        sys.exit(f"the plots are {drawn}")
    for words, verdict in TARGETS.items():
        if not any(words in line and line.split()[0] == verdict for line in output.splitlines()):
            sys.exit(f"'{words}' is not reported as '{verdict}':\n{output}")


main()
