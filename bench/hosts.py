#!/usr/bin/env python3
"""Measures traffic and times between hosts, on network namespaces with links shaped to 1 Gb/s.

Prints a line of JSON for each case: what, impl, wire, ranks, hosts, order (of the ranks on the hosts), bytes, median_s,
min_s, runs, wire_bytes (per run, of the busiest host and direction, from the counters of the interfaces), bound_s and
bound_bytes (one copy of the data each way per host, at the rate of TCP on such a link), and ratios of these. Removes
everything it creates; exits with 77 without root.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests/support"))
import cluster_job  # noqa: E402
import host_cluster  # noqa: E402
from cluster_job import Job, MpiJob, hosts_of_ranks, run  # noqa: E402

PAYLOAD_BITS_PER_S = 955e6  # payload of TCP on a link of 1 Gb/s; measured: 950 to 958


def link_rate(cluster):
    """Measures the payload bits per second of one TCP connection from host 1 to host 2."""
    code = (
        "import socket,sys; s=socket.create_connection((sys.argv[1],int(sys.argv[2]))); "
        "s.sendall(bytes(100<<20)); s.shutdown(1); s.recv(1)"
    )
    listener = (
        "import socket,sys,time\ns=socket.create_server(('0.0.0.0',0)); print(s.getsockname()[1],flush=True)\n"
        "c=s.accept()[0]; n=0; t=time.time()\n"
        "while True:\n  d=c.recv(1<<20)\n  if not d: break\n  n+=len(d)\nprint(n*8/(time.time()-t),flush=True)"
    )
    server = cluster.start(2, [sys.executable, "-c", listener], stdout=subprocess.PIPE, text=True)
    try:
        port = server.stdout.readline().strip()
        cluster.start(1, [sys.executable, "-c", code, f"{host_cluster.SUBNET}2", port]).wait(timeout=60)
        return float(server.stdout.readline())
    finally:
        server.kill()
        server.wait()


def report(case, result, crossed, data_bytes):
    hosts = case["hosts"]
    seconds = result["seconds"]
    size = 4 if case.get("wire", "float32") == "float32" else 2
    full = 2 * (hosts - 1) / hosts * data_bytes  # bytes of float32 that a host must send and receive
    median = statistics.median(seconds)
    row = {
        **case,
        "bytes": data_bytes,
        "median_s": round(median, 6),
        "min_s": round(min(seconds), 6),
        "runs": len(seconds),
        "wire_bytes": round(crossed / len(seconds)),
        "bound_bytes": round(full * size / 4),
        "bound_s": round(8 * full / PAYLOAD_BITS_PER_S, 6),
    }
    if data_bytes >= 1 << 20:
        row["time_to_bound"] = round(median / row["bound_s"], 4)
        row["bytes_to_bound"] = round(row["wire_bytes"] / row["bound_bytes"], 4)
    print(json.dumps(row), flush=True)
    return row


def all_reduces(args, cluster, hosts, ranks, orders, impls, sizes):
    for data_bytes in sizes:
        runs = args.runs if data_bytes > 1 << 20 else 500
        for order in orders:
            where = hosts_of_ranks(hosts, ranks, order)
            for impl in impls:
                case = {"what": "all_reduce", "impl": impl, "ranks": len(where), "hosts": hosts, "order": order}
                try:
                    if impl == "openmpi":
                        result, crossed = run(
                            cluster, MpiJob, where, [args.bin / "bench_hosts_mpi", data_bytes, runs], {}
                        )
                    else:
                        transport, _, wire = impl.partition(" ")
                        case["wire"] = wire or "float32"
                        cross_host = transport.partition("+")[2]
                        env = {
                            "LOCKSTEP_TRANSPORT": transport.partition("+")[0],
                            "LOCKSTEP_LOG": "quiet",
                            **({"LOCKSTEP_CROSS_HOST_TRANSPORT": cross_host} if cross_host else {}),
                        }
                        job_type = Job
                        binding = [HERE.parent / "tests/support/pinned.sh"] if args.bind else []
                        if "mpi" in transport:
                            job_type, binding = MpiJob, []
                            env["LOCKSTEP_STORE"] = f"{host_cluster.SUBNET}{where[0]}:{cluster_job.PORT}"
                        result, crossed = run(
                            cluster,
                            job_type,
                            where,
                            [*binding, args.bin / "bench_hosts_rank", "all_reduce", data_bytes, case["wire"], runs],
                            env,
                        )
                except RuntimeError as error:
                    print(json.dumps({**case, "bytes": data_bytes, "error": str(error)}), flush=True)
                    continue
                report(case, result, crossed, data_bytes)


def steps(args, cluster):
    """Measures steps of 10 M parameters; the bound is the larger of the computation alone and the transfer."""
    parameters = 10 * 1001 * 1000
    where = hosts_of_ranks(2, 2, "contiguous")
    for every, wire, optimizer in (step.split("/") for step in args.steps):
        every = int(every)
        words = [args.bin / "bench_hosts_rank", "step", every, wire, 16, args.batch, args.bucket_bytes, optimizer]
        result, crossed = run(cluster, Job, where, words, {"LOCKSTEP_LOG": "quiet"}, phases=2)
        compute = statistics.median(result["compute_seconds"])
        crossing = 8 * parameters * (4 if wire == "float32" else 2) / PAYLOAD_BITS_PER_S / every
        mean = statistics.mean(result["seconds"])
        print(
            json.dumps(
                {
                    "what": "step",
                    "impl": "hierarchy",
                    "optimizer": optimizer,
                    "wire": wire,
                    "average_hosts_every": every,
                    "ranks": 4,
                    "hosts": 2,
                    "order": "contiguous",
                    "bytes": 4 * parameters,
                    "batch": args.batch,
                    "bucket_bytes": args.bucket_bytes,
                    "median_s": round(statistics.median(result["seconds"]), 6),
                    "mean_s": round(mean, 6),
                    "min_s": round(min(result["seconds"]), 6),
                    "runs": 16,
                    "wire_bytes": round(crossed / 16),
                    "compute_s": round(compute, 6),
                    "bound_s": round(max(compute, crossing), 6),
                    "time_to_bound": round(mean / max(compute, crossing), 4),
                }
            ),
            flush=True,
        )


def gpt(args, cluster):
    """Measures the final loss and the traffic of a small GPT for several values of average_hosts_every."""
    where = hosts_of_ranks(2, 2, "contiguous")
    first = 0
    for every in (1, 4, 16):
        before = [cluster.bytes_of(host) for host in (1, 2)]
        job = Job(
            cluster,
            where,
            [
                args.bin / "03_gpt",
                "--corpus",
                HERE.parent / "lockstep",
                "--batch-size",
                16,
                "--steps",
                args.gpt_steps,
                "--sample",
                0,
                "--host-sync-every",
                every,
            ],
            {"LOCKSTEP_LOG": "quiet"},
        )
        try:
            loss = [
                float(line.split(":")[1].split()[0])
                for line in job.rank_zero.stdout
                if line.startswith("validation loss after")
            ]
            job.end()
        finally:
            job.stop()
        after = [cluster.bytes_of(host) for host in (1, 2)]
        crossed = max(b - a for begin, end in zip(before, after) for a, b in zip(begin, end))
        first = first or crossed
        print(
            json.dumps(
                {
                    "what": "gpt",
                    "impl": "hierarchy",
                    "average_hosts_every": every,
                    "ranks": 4,
                    "hosts": 2,
                    "order": "contiguous",
                    "steps": args.gpt_steps,
                    "validation_loss": loss[0],
                    "wire_bytes": crossed,
                    "bytes_to_every_1": round(crossed / first, 4),
                }
            ),
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=HERE.parent / "build/release/bin")
    parser.add_argument(
        "--rate", default="1gbit", help="rate of each link (default 1gbit, for which the bounds are computed)"
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of large all_reduces")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=["large", "small", "4x4", "step", "gpt"],
        default=["large", "small", "4x4", "step", "gpt"],
    )
    parser.add_argument(
        "--impls",
        nargs="+",
        help="implementations, such as 'hierarchy', 'hierarchy bfloat16', 'hierarchy+mpi', 'tcp', 'openmpi'",
    )
    parser.add_argument("--orders", nargs="+", default=["contiguous", "interleaved"])
    parser.add_argument("--batch", type=int, default=16, help="batch size of a step")
    parser.add_argument("--bucket-bytes", type=int, default=2 << 20, help="bucket size of a step")
    parser.add_argument(
        "--steps",
        nargs="+",
        default=["1/float32/fused", "1/float32/torch", "1/bfloat16/fused", "4/float32/fused", "16/float32/fused"],
        help="average_hosts_every/wire/optimizer",
    )
    parser.add_argument(
        "--bind",
        action="store_true",
        help="bind ranks to cores, as lockstep run does, where mpirun does not start them",
    )
    parser.add_argument("--gpt-steps", type=int, default=200)
    parser.add_argument("--bytes", type=int, default=250_000_000)
    args = parser.parse_args()
    host_cluster.enter_sandbox(("ip", "tc"))
    has_mpi = (args.bin / "bench_hosts_mpi").exists()
    if not has_mpi:
        print("SKIPPED: Open MPI is not installed (Debian: libopenmpi-dev openmpi-bin)", file=sys.stderr)
    mpi = ["openmpi"] if has_mpi else []
    by_mpi = ["hierarchy+mpi"] if has_mpi else []
    with tempfile.TemporaryDirectory() as folder:
        cluster = host_cluster.HostCluster(4 if "4x4" in args.only else 2, folder)
        cluster.shape(args.rate)
        print(json.dumps({"what": "line_rate", "bits_per_s": round(link_rate(cluster))}), flush=True)
        if "large" in args.only:
            all_reduces(
                args,
                cluster,
                2,
                2,
                args.orders,
                args.impls or ["hierarchy", "hierarchy bfloat16", *by_mpi, "tcp", *mpi],
                [args.bytes],
            )
        if "small" in args.only:
            all_reduces(args, cluster, 2, 2, args.orders, args.impls or ["hierarchy", *by_mpi, "tcp", *mpi], [4096])
        if "4x4" in args.only:
            all_reduces(
                args, cluster, 4, 4, ["contiguous"], args.impls or ["hierarchy", "hierarchy bfloat16"], [args.bytes]
            )
        if "step" in args.only:
            steps(args, cluster)
        if "gpt" in args.only:
            gpt(args, cluster)


main()
