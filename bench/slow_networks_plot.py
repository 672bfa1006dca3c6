#!/usr/bin/env python3
"""Keeps what bench/slow_networks.py has printed as CSV, and draws the loss over wall time from the CSV.

slow_networks_plot.py RESULTS --commit HASH  writes docs/data/slow_networks.csv and docs/images/slow-networks.svg
slow_networks_plot.py                        draws the picture again
"""

import argparse
import csv
import json
import math
import pathlib

import plots

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "docs/data/slow_networks.csv"
NAMES = {
    "ddp": "PyTorch DDP over gloo",
    "ddp bfloat16": "PyTorch, bf16 hook",
    "ddp powersgd": "PyTorch, PowerSGD",
    "powersgd": "PowerSGD",
    "average": "average_hosts_every=30",
    "diloco": "DiLoCo, float32",
    "diloco int8": "DiLoCo, int8",
    "diloco int4": "DiLoCo, int4",
    "sparseloco": "SparseLoCo",
}


def keep(results, commit):
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    rates = {}  # the mean time of a step on the slow link, of methods that exchange in every step
    DATA.parent.mkdir(exist_ok=True)
    with DATA.open("w", newline="") as file:
        file.write(f"# bench/slow_networks.py at {commit}; wall_s is the step times its mean time on the slow link\n")
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["model", "method", "seed", "step", "wall_s", "validation_loss"])
        for row in rows:
            key = (row.get("model"), row.get("method"))
            if row["what"] != "run":
                continue
            if row["steps"] <= 100:
                rates[key] = row["mean_step_s"]
            else:
                per_step = row["mean_step_s"] if row["rate"] else rates[key]
                for step, loss in row["points"]:
                    table.writerow([*key, row["seed"], step, f"{step * per_step:.2f}", f"{loss:.4f}"])


def draw(model):
    with DATA.open() as file:
        rows = [row for row in csv.DictReader(line for line in file if line[0] != "#") if row["model"] == model]
    lines = {}
    for row in rows:
        if row["seed"] == rows[0]["seed"]:
            lines.setdefault(row["method"], []).append((float(row["wall_s"]), float(row["validation_loss"])))
    left, top, width, height = 52, 48, 540, 320
    seconds = [s for line in lines.values() for s, _ in line]
    losses = [loss for line in lines.values() for _, loss in line]
    low, high = math.log10(min(seconds)), math.log10(max(seconds))
    least, most = min(losses), max(losses)
    x_of = lambda s: left + width * (math.log10(s) - low) / (high - low)
    y_of = lambda loss: top + height * (most - loss) / (most - least)
    body = []
    for power in range(math.ceil(low), math.floor(high) + 1):
        body.append(plots.text(x_of(10.0**power), top + height + 18, f"{10**power} s", "middle"))
    for i in range(math.ceil(2 * least), math.floor(2 * most) + 1):
        y = y_of(i / 2)
        body.append(f'<line class="g" x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}"/>')
        body.append(plots.text(left - 6, y + 4, f"{i / 2:.1f}", "end"))
    for number, (method, line) in enumerate(lines.items()):
        color = plots.COLORS[number % len(plots.COLORS)]
        points = " ".join(f"{x_of(s):.1f},{y_of(loss):.1f}" for s, loss in line)
        body.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        y = top + 16 + 18 * number
        body.append(f'<rect x="{left + width + 12}" y="{y - 10}" width="12" height="12" fill="{color}"/>')
        body.append(plots.text(left + width + 30, y, NAMES[method]))
    title = "Validation loss over wall time, 2 hosts with 2 ranks, an all-reduce 15 times as long as a step"
    (ROOT / "docs/images/slow-networks.svg").write_text(plots.svg(left + width + 200, top + height + 36, title, body))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=pathlib.Path)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    if args.results:
        keep(args.results, args.commit)
    draw("gpt")


main()
