"""Stage dp: DataParallel's table of memory by device."""

import json

from results import Failed
from stage import Row


def table(context):
    devices = ["cuda:0"] if context.device == "cuda" else ["cpu", "cpu"]
    _, text = context.run("data-parallel", [context.program("bench_gpu_data_parallel"), *devices], timeout=120)
    lines = text.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    if sum(row["replicas"] for row in rows) != len(devices):
        raise Failed(f"the table has {rows}, and there are {devices}")
    if context.device == "cuda" and not all(row["peak_bytes"] for row in rows):
        raise Failed(f"no peak of memory is known: {rows}")
    return {"devices": rows, "table": [line for line in lines if not line.startswith("{")]}


def rows(context):
    yield Row("memory by device", 20, lambda: table(context))
