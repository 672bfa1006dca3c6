#!/usr/bin/env python3
"""Tests that scripts of Lightning, Fabric, Accelerate and transformers run unchanged, with torchrun's losses.

Usage: frameworks.py --lockstep PROGRAM --package FOLDER [--python INTERPRETER] host|ssh|slurm
host: two ranks, beside torchrun, over Gloo and Lockstep, and Lightning's strategy "lockstep". ssh and
slurm: two hosts of a sandbox with two ranks each, beside four ranks of one host; they require root. The exit code is 77
if the machine lacks what the test requires.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import host_cluster  # noqa: E402
from checks import check  # noqa: E402

PROGRAM = pathlib.Path(__file__).with_name("program.py")
STRATEGIES = {
    "lightning": ("ddp", "lockstep", "lockstep-fused", "backend"),
    "fabric": ("ddp", "lockstep", "backend"),
    "accelerate": ("ddp", "backend"),
    "transformers": ("ddp", "backend"),
}


def output_of(command, environment):
    done = subprocess.run(
        [str(word) for word in command],
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
        check=False,
    )
    check(
        done.returncode == 0, f"{' '.join(map(str, command))[-120:]} {done.stdout[-3000:] if done.returncode else ''}"
    )
    return done.stdout


def losses_of(text):
    """Returns the line of rank 0, without a prefix."""
    found = [line[line.index(name) :] for line in text.splitlines() for name in STRATEGIES if f"{name}: " in line]
    check(len(found) == 1, f"one line of losses {found if len(found) == 1 else text}")
    return found[0]


def on_one_host(args):
    torchrun = pathlib.Path(args.python).with_name("torchrun")
    for name, strategies in STRATEGIES.items():
        words = [PROGRAM, name, 2, 1]
        with tempfile.TemporaryDirectory() as folder:  # torchrun leaves files
            command = [torchrun, "--nproc-per-node", 2, *words]
            expected = losses_of(output_of(command, {**os.environ, "TMPDIR": folder}))
        for strategy in strategies:
            environment = {**os.environ, "PYTHONPATH": args.package, "LOCKSTEP_LOG": "quiet"}
            command = [args.lockstep, "run", "-n", 2, "--", args.python, *words, strategy]
            found = losses_of(output_of(command, environment))
            check(are_close(found, expected), f"{strategy}: {found}; with torchrun {expected}")


def are_close(one, other):
    """Whether the losses are equal within rounding, which differs with the order of additions."""
    (head, *losses), (other_head, *others) = ([*text.split(",")[:1], *text.split()[3:]] for text in (one, other))
    return head == other_head and all(
        abs(float(a) - float(b)) <= 1e-5 * max(1, abs(float(b))) for a, b in zip(losses, others, strict=True)
    )


def expected_on_one_host(args, name):
    return losses_of(
        output_of([args.lockstep, "run", "-n", 4, "--bind", "none", "--", args.python, PROGRAM, name, 4, 1], os.environ)
    )


def over_ssh(args):
    import ssh_cluster

    host_cluster.enter_sandbox(ssh_cluster.TOOLS)

    def unchanged_scripts(cluster):
        for name in STRATEGIES:
            command = [args.lockstep, "run", "-H", "h1:2,h2:2", "--", args.python, PROGRAM, name, 2, 2]
            found, expected = losses_of(output_of(command, os.environ)), expected_on_one_host(args, name)
            check(are_close(found, expected), f"{found}; on one host {expected}")

    ssh_cluster.run_cases({"unchanged_scripts": unchanged_scripts}, [], 2, 1)


def in_slurm(args):
    import slurm_cluster

    host_cluster.enter_sandbox((*slurm_cluster.TOOLS, "salloc"))
    with tempfile.TemporaryDirectory() as folder:
        cluster = slurm_cluster.SlurmCluster(folder)
        for name in STRATEGIES:
            words = ["--", args.python, PROGRAM, name, 2, 2]
            expected = expected_on_one_host(args, name)
            command = ["salloc", "--quiet", "-N2", "-n4", args.lockstep, "run", *words]
            found = losses_of(output_of(command, cluster.environment))
            check(are_close(found, expected), f"salloc: {found}; on one host {expected}")
            logs = pathlib.Path(folder, name)
            submit = ["submit", "--nodes=2", "--ranks-per-node=2", "--follow", f"--output={logs}"]
            found = losses_of(output_of([args.lockstep, *submit, *words], cluster.environment))
            check(are_close(found, expected), f"submit: {found}")
        cluster.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("--package", required=True)
    parser.add_argument("--python", default="")
    parser.add_argument("where", choices=("host", "ssh", "slurm"))
    args = parser.parse_args()
    if not args.python:
        host_cluster.skip("no Python with torch (scripts/setup.sh installs one)")
    {"host": on_one_host, "ssh": over_ssh, "slurm": in_slurm}[args.where](args)


if __name__ == "__main__":
    main()
