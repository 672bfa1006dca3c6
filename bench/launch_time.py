#!/usr/bin/env python3
"""How long it takes to start ranks on several hosts, which are network namespaces with sshd: `lockstep run -H`, beside mpirun and one ssh a rank.

Prints a line of JSON for each entrant of each case: what (true: a program that ends at once, until the launcher has ended; barrier: until all ranks have met), impl, hosts, ranks (of each), median_s, min_s, runs,
connections (that the host with most of them took in one run). The entrants take turns. Leaves nothing behind; exits with 77 without root.
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


def host_list(hosts, ranks):
    return ",".join(f"h{host}:{ranks}" for host in range(1, hosts + 1))


def commands(args, what, hosts, ranks):
    """{impl: the words of one or several commands that are started at once}"""
    mine, mpi = (
        ("/bin/true", "/bin/true")
        if what == "true"
        else (f"{args.bin}/bench_launch_rank", f"{args.bin}/bench_launch_mpi")
    )
    entrants = {"lockstep": [[f"{args.bin}/lockstep", "run", "-H", host_list(hosts, ranks), mine]]}
    if ssh_cluster.has_mpirun() and (what == "true" or pathlib.Path(mpi).exists()):
        entrants["mpirun"] = [
            [
                "mpirun",
                "--allow-run-as-root",
                "--oversubscribe",
                "--bind-to",
                "none",
                "--host",
                host_list(hosts, ranks),
                mpi,
            ]
        ]
    if what == "true":
        entrants["ssh a rank"] = [["ssh", f"h{host}", mine] for host in range(1, hosts + 1) for _ in range(ranks)]
    return entrants


def once(words_of_all, what):
    begun = time.monotonic_ns()
    started = [
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for words in words_of_all
    ]
    ends = [process.communicate(timeout=120) for process in started]
    if any(process.returncode != 0 for process in started):
        raise RuntimeError(f"{words_of_all[0]} failed: {ends}")
    if what == "true":
        return (time.monotonic_ns() - begun) / 1e9
    return (int(ends[0][0].split()[-1]) - begun) / 1e9


def measure(args, bed, what, hosts, ranks):
    entrants = commands(args, what, hosts, ranks)
    seconds = {impl: [] for impl in entrants}
    connections = {}
    for run in range(args.runs + 1):
        order = list(entrants)
        for impl in order if run % 2 else reversed(order):
            before = [bed.connections(host) for host in range(1, hosts + 1)]
            took = once(entrants[impl], what)
            if run > 0:  # the first warms up
                seconds[impl].append(took)
            connections[impl] = max(bed.connections(host) - old for host, old in enumerate(before, start=1))
    for impl, all_of_it in seconds.items():
        print(
            json.dumps(
                {
                    "what": what,
                    "impl": impl,
                    "hosts": hosts,
                    "ranks": ranks,
                    "median_s": round(statistics.median(all_of_it), 4),
                    "min_s": round(min(all_of_it), 4),
                    "runs": len(all_of_it),
                    "connections": connections[impl],
                }
            ),
            flush=True,
        )
    return {impl: statistics.median(all_of_it) for impl, all_of_it in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    host_cluster.enter_sandbox(ssh_cluster.TOOLS)
    with tempfile.TemporaryDirectory() as folder:
        bed = ssh_cluster.SshCluster(8, folder)
        measure(args, bed, "true", 2, 2)
        measure(args, bed, "barrier", 2, 2)
        measure(args, bed, "barrier", 8, 4)


main()
