#!/usr/bin/env python3
"""Compares `lockstep plan` with measurements: steps on 2 and 4 hosts, for links of several rates, models and methods.

The hosts are network namespaces. Each has one core, or half of one, and one rank. The prediction comes first, from one
host, whose share of the machine is as large as in the cluster, because the others are busy with the same model, and
from the rate at which bytes pass over the links. Prints a line of JSON for each cell, and a summary: how many cells are
within 10 %, how many intervals hold the measurement, and the same for the cells in which the network is the limit, and
for models and rates that the model's constants were not chosen with (HELD_OUT). Removes everything it creates; exits
with 77 without root.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests/support"))
import host_cluster  # noqa: E402
from cluster_job import Job  # noqa: E402

MODELS = ("gpt-0.8m", "gpt-3m", "cnn-1m", "mlp-10m")
METHODS = ("float32", "bfloat16", "int8", "PowerSGD", "DiLoCo")
RATES = ("100m", "300m", "1g")
HELD_OUT = {"mlp-10m", "300m"}
EVERY = 10
# What passes at once after a pause: at least the largest packet that a host hands to its link, and 2 ms of the rate,
# because less slows links down that two busy cores have to serve.
BURST = {"100m": "64kb", "300m": "75kb", "1g": "250kb"}
SECONDS = 6  # of each measurement, at least 6 steps


class PinnedJob(Job):
    """Host k has the k-th core, modulo their number."""

    def __init__(self, cluster, where, words, env):
        pinning = HERE.parent / "tests/support/pinned.sh"
        super().__init__(cluster, where, [pinning, *words], env)


def rank_words(args, model, method, **case):
    case = {"model": model, "method": method, "every": EVERY, **case}
    return [args.python, str(HERE / "plan_rank.py"), json.dumps(case)]


# A host sends to the other one, and receives from it, as long as the time in argv; prints the bytes per second.
EXCHANGE = """\
import socket, sys, threading, time
own, peer, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
listener = socket.create_server((own, 7777))
def send():
    end_of_tries = time.monotonic() + 10
    while True:
        try:
            sock = socket.create_connection((peer, 7777))
            break
        except OSError:
            if time.monotonic() > end_of_tries:
                raise
            time.sleep(0.1)
    data, end = bytes(1 << 18), time.monotonic() + seconds
    while time.monotonic() < end:
        sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
threading.Thread(target=send).start()
sock, got = listener.accept()[0], 0
begin = time.monotonic()
while data := sock.recv(1 << 18):
    got += len(data)
print(got / (time.monotonic() - begin))
"""


def wire_rate(args, cluster, rate):
    """The --link with whose payload, 0.955 of it, two hosts send each other bytes by TCP at the same time."""
    cluster.shape(f"{rate}bit", [1, 2], BURST[rate])
    ends = [[f"{host_cluster.SUBNET}{host}" for host in pair] for pair in ((1, 2), (2, 1))]
    programs = [
        cluster.start(host, [args.python, "-c", EXCHANGE, *addresses, "3"], stdout=subprocess.PIPE, text=True)
        for host, addresses in enumerate(ends, start=1)
    ]
    payload = min(float(program.communicate(timeout=60)[0]) for program in programs)
    cluster.unshape([1, 2])
    return f"{8e-6 * payload / 0.955:.1f}m"


def predict(args, hosts, model, links):
    """The output of `lockstep plan` on one host, while the others of the machine train the same model alone."""
    env = {**os.environ, "PYTHONPATH": args.package, "LOCKSTEP_LOG": "quiet", "OMP_NUM_THREADS": "1"}
    cores = os.cpu_count()
    others = [
        subprocess.Popen(
            ["taskset", "-c", str(host % cores), *rank_words(args, model, "float32")],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # as the rank has: the kernel shares cores between sessions
        )
        for host in range(1, hosts)
    ]
    try:
        time.sleep(6)  # they import torch
        words = [
            "taskset",
            "-c",
            "0",
            args.lockstep,
            "plan",
            "-n",
            "1",
            "--nodes",
            str(hosts),
            "--link",
            ",".join(links),
        ]
        words += ["--every", str(EVERY), "--latency", "50us", "--json", "--", *rank_words(args, model, "float32")]
        done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        for other in others:
            other.kill()
            other.wait()
    return json.loads(done.stdout)


def measure(args, cluster, hosts, model, method, steps):
    """The seconds of a step for each of RATES."""
    case = rank_words(args, model, method, runs=steps)
    job = PinnedJob(cluster, list(range(1, hosts + 1)), case, {"PYTHONPATH": args.package, "LOCKSTEP_LOG": "quiet"})
    found = []
    try:
        job.wait_until_ready()
        for rate in RATES:
            cluster.shape(f"{rate}bit", range(1, hosts + 1), BURST[rate])
            job.go()
            found.append(json.loads(job.line())["step_s"])
            cluster.unshape(range(1, hosts + 1))
        job.end()
    finally:
        job.stop()
    return found


def summarize(name, cells):
    if not cells:
        return
    near = sum(abs(cell["error"]) <= 0.1 for cell in cells)
    held = sum(cell["low_s"] <= cell["measured_s"] <= cell["high_s"] for cell in cells)
    worst = max(cells, key=lambda cell: abs(cell["error"]))
    row = {"what": name, "cells": len(cells), "within_10": near / len(cells), "interval_holds": held / len(cells)}
    print(json.dumps({**row, "worst": worst["error"], "worst_cell": [worst[k] for k in KEYS]}), flush=True)


KEYS = ("hosts", "rate", "model", "method")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", required=True, help="the program lockstep")
    parser.add_argument("--package", required=True, help="folder with the Python package")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    args = parser.parse_args()
    host_cluster.enter_sandbox(("ip", "tc", "taskset"))
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        cluster = host_cluster.HostCluster(max(args.hosts), folder)
        links = [wire_rate(args, cluster, rate) for rate in RATES]
        print(json.dumps({"what": "links", **dict(zip(RATES, links, strict=True))}), flush=True)
        for hosts in args.hosts:
            for model in args.models:
                for method in args.methods:
                    plan = predict(args, hosts, model, links)
                    rate_of = dict(zip(dict.fromkeys(p["bits_per_s"] for p in plan["predictions"]), RATES))
                    told = {(p["method"], rate_of[p["bits_per_s"]]): p for p in plan["predictions"]}
                    alone = sum(plan["steps_s"]) / len(plan["steps_s"])
                    ours = [told[method, rate] for rate in RATES]
                    steps = [min(60, max(6, round(SECONDS / one["step_s"]))) for one in ours]
                    if method == "DiLoCo":
                        steps = [max(2 * EVERY, count // EVERY * EVERY) for count in steps]
                    for rate, one, seconds in zip(RATES, ours, measure(args, cluster, hosts, model, method, steps)):
                        cells.append({
                            "what": "cell", "hosts": hosts, "rate": rate, "model": model, "method": method,
                            "alone_s": round(alone, 5), "predicted_s": round(one["step_s"], 5),
                            "measured_s": round(seconds, 5), "error": round(one["step_s"] / seconds - 1, 4),
                            "low_s": round(one["low_s"], 5), "high_s": round(one["high_s"], 5),
                            "waits": round(one["waits_s"] / one["step_s"], 3),
                        })  # fmt: skip
                        print(json.dumps(cells[-1]), flush=True)
    summarize("all", cells)
    summarize("network is the limit", [cell for cell in cells if cell["waits"] > 0.1])
    summarize("held out", [cell for cell in cells if HELD_OUT & {cell["rate"], cell["model"]}])


main()
