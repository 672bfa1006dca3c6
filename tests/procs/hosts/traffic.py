#!/usr/bin/env python3
"""Measures the traffic between two hosts, which are network namespaces, and tests that a lost host ends the job.

Usage: traffic.py PATH_OF_BENCH_HOSTS_RANK [CASE...]. The default is all cases. The exit code is 77 if the machine lacks
what they require.
"""

import csv
import pathlib
import shutil
import signal
import statistics
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import fake_mnist  # noqa: E402
import host_cluster  # noqa: E402
from checks import check  # noqa: E402
from cluster_job import Job, MpiJob, hosts_of_ranks, run  # noqa: E402

BYTES = 32 << 20
QUIET = {"LOCKSTEP_LOG": "quiet"}


def traffic_ratio(cluster, binary, order, wire_dtype):
    """Returns the bytes that the busiest host sends or receives for one all_reduce, divided by those of the tensor."""
    runs = 3
    answer, crossed = run(
        cluster, Job, hosts_of_ranks(2, 2, order), [binary, "all_reduce", BYTES, wire_dtype, runs], QUIET
    )
    check(answer["transport"] == "hierarchy", f"two hosts are found: transport {answer['transport']}")
    return crossed / runs / BYTES


def each_byte_is_sent_once_per_host(cluster, binary):
    for order in ("contiguous", "interleaved"):
        once = traffic_ratio(cluster, binary, order, "float32")
        check(0.95 < once <= 1.05, f"{order}: the traffic is {once:.3f} of the tensor")


def bfloat16_halves_traffic(cluster, binary):
    half = traffic_ratio(cluster, binary, "contiguous", "bfloat16")
    check(0.45 < half <= 0.525, f"as bfloat16 the traffic is {half:.3f} of the tensor")


def int8_quarters_traffic(cluster, binary):
    quarter = traffic_ratio(cluster, binary, "contiguous", "int8")
    check(0.24 < quarter <= 0.2667, f"as int8 the traffic is {quarter:.4f} of the tensor")
    ratio = traffic_of_steps(cluster, binary, wire="int8") / traffic_of_steps(cluster, binary)
    check(0.24 < ratio <= 0.2667, f"steps with int8 send {ratio:.4f} of the bytes of float32")


def traffic_of_steps(cluster, binary, every=1, wire="float32", optimizer="torch"):
    """Returns the bytes that the busiest host sends or receives in 8 steps."""
    words = [binary, "step", every, wire, 8, 8, 25 << 20, optimizer]
    return run(cluster, Job, hosts_of_ranks(2, 2, "contiguous"), words, QUIET, phases=2)[1]


def average_hosts_every_4_quarters_traffic(cluster, binary):
    ratio = traffic_of_steps(cluster, binary, every=4) / traffic_of_steps(cluster, binary)
    check(0.2 < ratio <= 1.05 / 4, f"average_hosts_every 4 sends {ratio:.4f} of the bytes of 1")


def sharded_state_costs_no_more_than_an_all_reduce(cluster, binary):
    ratio = traffic_of_steps(cluster, binary, optimizer="sharded") / traffic_of_steps(cluster, binary)
    check(0.95 < ratio <= 1.01, f"with shard_state, steps send {ratio:.4f} of the bytes of those without")


def host_failure_ends_job(cluster, binary):
    where = hosts_of_ranks(2, 2, "contiguous")
    cluster.shape("100mbit")  # slow, so that the host dies during an operation
    # The full queue of the link may drop the packet that reports the death: then the deadline ends the ranks.
    job = Job(cluster, where, [binary, "all_reduce", 8 << 20, "float32", 1000], {**QUIET, "LOCKSTEP_TIMEOUT": 10})
    try:
        job.wait_until_ready()
        begun = cluster.bytes_of(2)[1]
        job.go()
        while cluster.bytes_of(2)[1] < begun + (4 << 20):
            pass
        for rank, host in enumerate(where):
            if host == 2:
                job.processes[rank].send_signal(signal.SIGKILL)
        codes = [job.processes[rank].wait(timeout=30) for rank, host in enumerate(where) if host == 1]
        check(all(code == 1 for code in codes), f"the ranks of the other host end with an error: {codes}")
    finally:
        job.stop()


def mnist_losses_match_over_mpi_and_tcp(cluster, binary):
    if not shutil.which("mpirun"):
        host_cluster.skip("mpirun is not installed (Debian: openmpi-bin)")
    folder = pathlib.Path(cluster.folder)
    fake_mnist.write(folder, 400)
    losses = {}
    for transport, job_type in (("tcp", Job), ("mpi", MpiJob), ("hierarchy", MpiJob)):
        log = folder / f"losses.{transport}"
        words = [
            pathlib.Path(binary).parent / "02_mnist",
            "--data",
            folder,
            "--epochs",
            5,
            "--lr",
            0.05,
            "--batch-size",
            40,
            "--loss-log",
            log,
        ]
        job = job_type(cluster, hosts_of_ranks(2, 2, "contiguous"), words, {**QUIET, "LOCKSTEP_TRANSPORT": transport})
        try:
            job.end()
        finally:
            job.stop()
        losses[transport] = [float(line) for line in log.read_text(encoding="ascii").splitlines()]
    check(
        len(losses["tcp"]) == 50 and losses["tcp"][-1] < 0.9 * losses["tcp"][0],
        f"the loss decreases: {losses['tcp'][0]:.4f} to {losses['tcp'][-1]:.4f}",
    )
    for transport in ("mpi", "hierarchy"):
        difference = max(abs(a - b) for a, b in zip(losses["tcp"], losses[transport], strict=True))
        check(difference <= 1e-5, f"losses over {transport} and over tcp differ by {difference:.2e}")


def trained_values(cluster, binary, jobs):
    """Runs trainings at the same time, each on ranks on given hosts, and returns the last line of each metrics.csv."""
    program = pathlib.Path(binary).parent / "procs_trainer_probe"
    folders = [pathlib.Path(tempfile.mkdtemp(dir=cluster.folder)) for _ in jobs]
    running = []
    try:
        for where, folder in zip(jobs, folders, strict=True):
            running.append(Job(cluster, where, [program, folder, 40, 1400], QUIET))
        for job in running:
            job.end()
    finally:
        for job in running:
            job.stop()
    rows = []
    for folder in folders:
        with next(folder.glob("*/metrics.csv")).open(encoding="utf-8") as lines:
            rows.append({name: float(value) for name, value in list(csv.DictReader(lines))[-1].items() if value})
        report = next(folder.glob("*/report.html")).read_text(encoding="utf-8")
        check(("<th>comm</th>" in report) == ("time/comm" in rows[-1]), "the report has the time if the files have")
    return rows


def trainer_shows_time_and_bytes_between_hosts(cluster, binary):
    """Beside the same ranks, each in a training of its own: what they take longer together is the exchange. Medians of
    three turns."""
    cluster.shape("1gbit")
    turns = []
    try:
        for _ in range(3):
            (together,) = trained_values(cluster, binary, [[1, 2]])
            alone = trained_values(cluster, binary, [[1], [2]])
            check(all("time/comm" not in row for row in alone), "a single rank has no time between ranks")
            turns.append((together, alone))
    finally:
        cluster.unshape()

    def median(value):
        return statistics.median(value(*turn) for turn in turns)

    seconds = median(lambda together, _: 1 / together["throughput/steps_per_second"])
    computed = median(lambda _, alone: sum(1 / row["throughput/steps_per_second"] for row in alone) / 2)
    exchange, shown = (seconds - computed) / seconds, median(lambda together, _: together["time/comm"])
    check(abs(shown - exchange) <= 0.03, f"comm is {shown:.3f} of a step, and the exchange {exchange:.3f}")
    sent = median(lambda together, _: together["throughput/sent_mb_per_second"]) * seconds
    due = 3 * 1400**2 * 4 / 1e6
    check(0.9 * due < sent < 1.15 * due, f"a host sends {sent:.1f} MB a step for {due:.1f} MB of gradients")


CASES = {
    case.__name__: case
    for case in (
        each_byte_is_sent_once_per_host,
        bfloat16_halves_traffic,
        int8_quarters_traffic,
        sharded_state_costs_no_more_than_an_all_reduce,
        average_hosts_every_4_quarters_traffic,
        host_failure_ends_job,
        trainer_shows_time_and_bytes_between_hosts,
        mnist_losses_match_over_mpi_and_tcp,
    )
}


def main():
    binary, names = sys.argv[1], sys.argv[2:] or list(CASES)
    host_cluster.enter_sandbox(("ip", "tc"))
    with tempfile.TemporaryDirectory() as folder:
        cluster = host_cluster.HostCluster(2, folder)
        for name in names:
            CASES[name](cluster, binary)


main()
