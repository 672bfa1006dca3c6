#!/usr/bin/env python3
"""Measures the start of ranks on several hosts with `lockstep run -H`, mpirun and one ssh per rank.

The hosts are network namespaces with sshd. Prints a line of JSON for each implementation of each case: what (true: from
the start until the launcher of /bin/true exits; barrier: until all ranks have joined), impl, hosts, ranks (per host),
median_s, min_s, runs, connections (maximum per host in one run). The implementations are measured in turns. Removes
everything it creates; exits with 77 without root.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests/support"))
import host_cluster  # noqa: E402
import ssh_cluster  # noqa: E402

LIMIT_S = 120  # of one launch; an implementation that takes longer is not measured in the case


class TooSlowError(Exception):
    pass


def host_list(hosts, ranks):
    return ",".join(f"h{host}:{ranks}" for host in range(1, hosts + 1))


def commands(args, what, hosts, ranks):
    """Returns, by implementation, the commands that are started at the same time."""
    program, mpi_program = (
        ("/bin/true", "/bin/true")
        if what == "true"
        else (f"{args.bin}/bench_launch_rank", f"{args.bin}/bench_launch_mpi")
    )
    words = [f"{args.bin}/lockstep", "run", "--share-gpus", "-H", host_list(hosts, ranks), program]
    implementations = {"lockstep": [words]}
    if ssh_cluster.has_mpirun() and (what == "true" or pathlib.Path(mpi_program).exists()):
        implementations["mpirun"] = [
            [
                "mpirun",
                "--allow-run-as-root",
                "--oversubscribe",
                "--bind-to",
                "none",
                "--host",
                host_list(hosts, ranks),
                mpi_program,
            ]
        ]
    if what == "true":
        implementations["ssh a rank"] = [
            ["ssh", f"h{host}", program] for host in range(1, hosts + 1) for _ in range(ranks)
        ]
    return {impl: words for impl, words in implementations.items() if not args.impl or impl in args.impl}


def time_launch(words_of_all, what):
    """Starts the commands and returns the seconds of one launch."""
    begin = time.monotonic_ns()
    started = [
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for words in words_of_all
    ]
    try:
        ends = [process.communicate(timeout=LIMIT_S) for process in started]
    except subprocess.TimeoutExpired as error:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        raise TooSlowError from error
    if any(process.returncode != 0 for process in started):
        raise RuntimeError(f"{words_of_all[0]} failed: {ends}")
    if what == "true":
        return (time.monotonic_ns() - begin) / 1e9
    return (int(ends[0][0].split()[-1]) - begin) / 1e9


def measure(args, cluster, what, hosts, ranks):
    implementations = commands(args, what, hosts, ranks)
    seconds = {impl: [] for impl in implementations}
    connections = {}
    for run in range(args.runs + 1):
        order = list(implementations)
        for impl in order if run % 2 else order[::-1]:
            before = [cluster.connections(host) for host in range(1, hosts + 1)]
            try:
                took = time_launch(implementations[impl], what)
            except TooSlowError:
                del implementations[impl], seconds[impl]
                row = {"what": what, "impl": impl, "hosts": hosts, "ranks": ranks, "longer_than_s": LIMIT_S}
                print(json.dumps(row), flush=True)
                continue
            if run > 0:  # the first warms up
                seconds[impl].append(took)
            connections[impl] = max(cluster.connections(host) - old for host, old in enumerate(before, start=1))
    for impl, samples in seconds.items():
        print(
            json.dumps(
                {
                    "what": what,
                    "impl": impl,
                    "hosts": hosts,
                    "ranks": ranks,
                    "median_s": round(statistics.median(samples), 4),
                    "min_s": round(min(samples), 4),
                    "runs": len(samples),
                    "connections": connections[impl],
                }
            ),
            flush=True,
        )
    return {impl: statistics.median(samples) for impl, samples in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--impl", nargs="+", help="only these implementations")
    parser.add_argument("--hosts", type=int, nargs="+", help="only the barrier, on so many hosts with 8 ranks each")
    args = parser.parse_args()
    host_cluster.enter_sandbox(ssh_cluster.TOOLS)
    with tempfile.TemporaryDirectory() as folder:
        cluster = ssh_cluster.SshCluster(max(args.hosts or [8]), folder)
        cluster.introduce()
        for hosts in args.hosts or []:
            measure(args, cluster, "barrier", hosts, 8)
        if args.hosts:
            return
        measure(args, cluster, "true", 2, 2)
        measure(args, cluster, "barrier", 2, 2)
        measure(args, cluster, "barrier", 8, 4)


main()
