#!/usr/bin/env python3
"""Cuts two of three hosts off from each other during a training, while both still reach the launcher.

Usage: cut_between_hosts.py --lockstep PATH --program PATH_OF_TRAIN_PROBE [--runs N] [--transport NAME] [CASE...]
A lasting cut must end the job within 10 s with a line that names both hosts; a cut of 4 s must not change the training,
also if it separates one host from the others and from the launcher.
The exit code is 77 if the machine lacks what the script requires.
"""

import argparse
import os
import pathlib
import random
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import history  # noqa: E402
import host_cluster  # noqa: E402
import ssh_cluster  # noqa: E402
from checks import check, wait_until  # noqa: E402
from ssh_cluster import LockstepRun  # noqa: E402

HOSTS = 3
RANKS_PER_HOST = 2
STEPS = 300
WARM_UP_STEPS = 25
SHORT_S = 4
LIMIT_S = 10


def start(args, folder, *options):
    hosts = ",".join(f"h{host}:{RANKS_PER_HOST}" for host in range(1, HOSTS + 1))
    job = LockstepRun(
        args.lockstep, "-H", hosts, *options, "--transport", args.transport, "--", args.program, "chaos", folder, STEPS
    )
    ranks = range(HOSTS * RANKS_PER_HOST)
    wait_until(
        lambda: (
            job.process.poll() is not None or min(len(history.read(folder, rank)) for rank in ranks) > WARM_UP_STEPS
        ),
        "the training does not start",
        60,
    )
    time.sleep(random.uniform(0, 0.3))
    return job


def cut(cluster, a, b):
    cluster.cut_one_way(a, b)
    cluster.cut_one_way(b, a)


def heal(cluster, a, b):
    cluster.heal_one_way(a, b)
    cluster.heal_one_way(b, a)


def lasting_cut(args, cluster, folder):
    a, b = random.sample(range(1, HOSTS + 1), 2)
    job = start(args, folder)
    cut(cluster, a, b)
    begun = time.monotonic()
    try:
        code, _, err = job.end(60)
    finally:
        heal(cluster, a, b)
    took = time.monotonic() - begun
    line = err.splitlines()[-1]
    check(
        code == 69 and took <= LIMIT_S and "cause=PEER_UNREACHABLE" in line and f"h{a}" in line and f"h{b}" in line,
        f"h{a} and h{b} cut off: ended after {took:.1f} s with {code}: {line}",
    )


def short_cut(args, cluster, folder, *options, seconds=SHORT_S):
    a, b = random.sample(range(1, HOSTS + 1), 2)
    job = start(args, folder, *options)
    cut(cluster, a, b)
    time.sleep(seconds)
    heal(cluster, a, b)
    expect_success(job, folder, f"h{a} and h{b} cut off for {seconds} s")


def short_cut_of_host(args, cluster, folder):
    """One host reaches neither the others nor the launcher."""
    host = random.randint(1, HOSTS)
    job = start(args, folder)
    cluster.cut(host)
    time.sleep(SHORT_S)
    cluster.heal(host)
    expect_success(job, folder, f"h{host} cut off for {SHORT_S} s")


def expect_success(job, folder, what):
    code, _, err = job.end(120)
    histories = [history.read(folder, rank) for rank in range(HOSTS * RANKS_PER_HOST)]
    wrong = history.check_hashes(histories, None) + history.check_samples(histories, True)
    finished = all(any("done" in line for line in lines) for lines in histories)
    check(code == 0 and finished and not wrong, f"{what}: {code} {wrong} {err[-600:]}")


def longer_host_timeout(args, cluster, folder):
    """With --host-timeout, a longer cut between two hosts is tolerated, and a lasting one is still found."""
    short_cut(args, cluster, folder, "--host-timeout", "12", seconds=8)
    with tempfile.TemporaryDirectory() as other:
        job = start(args, pathlib.Path(other), "--host-timeout", "2")
        begun = time.monotonic()
        cluster.cut(2)
        try:
            code, _, err = job.end(60)
        finally:
            cluster.heal(2)
        took = time.monotonic() - begun
        line = err.splitlines()[-1]
        check(
            code == 69 and took <= 6 and "cause=PEER_UNREACHABLE" in line and "for 2 s" in line,
            f"--host-timeout 2: ended after {took:.1f} s with {code}: {line}",
        )


CASES = {case.__name__: case for case in (lasting_cut, short_cut, short_cut_of_host, longer_host_timeout)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lockstep", required=True, type=os.path.abspath)
    parser.add_argument("--program", required=True, type=os.path.abspath)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    args = parser.parse_args()
    host_cluster.enter_sandbox(ssh_cluster.TOOLS)
    with tempfile.TemporaryDirectory() as folder:
        cluster = ssh_cluster.SshCluster(HOSTS, folder)
        for case in args.cases:
            for _ in range(args.runs):
                print(f"-- {case}", flush=True)
                with tempfile.TemporaryDirectory() as run:
                    CASES[case](args, cluster, pathlib.Path(run))


main()
