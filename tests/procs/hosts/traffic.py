#!/usr/bin/env python3
"""Ranks on two hosts, as network namespaces: what crosses between them is counted at their interfaces, and a host that dies ends the job.

hosts_test.py BIN [CASE...]; without cases all. Exit code 77: skipped.
"""

import pathlib
import shutil
import signal
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))
import digits  # noqa: E402
import host_cluster  # noqa: E402
from cluster_job import Job, MpiJob, places, run  # noqa: E402

BYTES = 32 << 20
QUIET = {"LOCKSTEP_LOG": "quiet"}


def check(good, text):
    print(("ok: " if good else "FAILED: ") + text, flush=True)
    if not good:
        raise SystemExit(1)


def crossing(bed, binary, order, wire):
    """Bytes that the busiest host sends or gets for one all_reduce, as a multiple of the tensor's."""
    runs = 3
    answer, crossed = run(bed, Job, places(2, 2, order), [binary, "all_reduce", BYTES, wire, runs], QUIET)
    check(answer["transport"] == "hierarchy", f"two hosts are found: transport {answer['transport']}")
    return crossed / runs / BYTES


def each_byte_is_sent_once_per_host(bed, binary):
    for order in ("contiguous", "interleaved"):
        once = crossing(bed, binary, order, "float32")
        check(0.95 < once <= 1.05, f"{order}: {once:.3f} of the tensor crosses")


def bfloat16_halves_traffic(bed, binary):
    half = crossing(bed, binary, "contiguous", "bfloat16")
    check(0.45 < half <= 0.525, f"as bfloat16 {half:.3f} of the tensor crosses")


def host_sync_every_4_quarters_traffic(bed, binary):
    crossed = {
        every: run(
            bed,
            Job,
            places(2, 2, "contiguous"),
            [binary, "step", every, "float32", 8, 8, 25 << 20, "torch"],
            QUIET,
            phases=2,
        )[1]
        for every in (1, 4)
    }
    ratio = crossed[4] / crossed[1]
    check(0.2 < ratio <= 1.05 / 4, f"average_hosts_every 4 sends {ratio:.4f} of what 1 does")


def host_failure_ends_job(bed, binary):
    where = places(2, 2, "contiguous")
    bed.shape("100mbit")  # so that it dies in the middle
    # The full queue of the link may lose the one packet that tells of the death: then the operation's deadline ends the others.
    job = Job(bed, where, [binary, "all_reduce", 8 << 20, "float32", 1000], {**QUIET, "LOCKSTEP_TIMEOUT": 10})
    try:
        job.wait_until_ready()
        begun = bed.bytes_of(2)[1]
        job.go()
        while bed.bytes_of(2)[1] < begun + (4 << 20):
            pass
        for rank, host in enumerate(where):
            if host == 2:
                job.processes[rank].send_signal(signal.SIGKILL)
        codes = [job.processes[rank].wait(timeout=30) for rank, host in enumerate(where) if host == 1]
        check(all(code == 1 for code in codes), f"the ranks of the other host end by an error: {codes}")
    finally:
        job.stop()


def mnist_losses_match_over_mpi_and_gloo(bed, binary):
    if not shutil.which("mpirun"):
        host_cluster.skip("mpirun is not installed (Debian: openmpi-bin)")
    folder = pathlib.Path(bed.folder)
    digits.write(folder, 400)
    losses = {}
    for transport, job_type in (("gloo", Job), ("mpi", MpiJob), ("hierarchy", MpiJob)):
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
        job = job_type(bed, places(2, 2, "contiguous"), words, {**QUIET, "LOCKSTEP_TRANSPORT": transport})
        try:
            job.end()
        finally:
            job.stop()
        losses[transport] = [float(line) for line in log.read_text(encoding="ascii").splitlines()]
    check(
        len(losses["gloo"]) == 50 and losses["gloo"][-1] < 0.9 * losses["gloo"][0],
        f"it learns: {losses['gloo'][0]:.4f} to {losses['gloo'][-1]:.4f}",
    )
    for transport in ("mpi", "hierarchy"):
        apart = max(abs(a - b) for a, b in zip(losses["gloo"], losses[transport], strict=True))
        check(apart <= 1e-5, f"losses over {transport} and over gloo are {apart:.2e} apart")


CASES = {
    case.__name__: case
    for case in (
        each_byte_is_sent_once_per_host,
        bfloat16_halves_traffic,
        host_sync_every_4_quarters_traffic,
        host_failure_ends_job,
        mnist_losses_match_over_mpi_and_gloo,
    )
}


def main():
    binary, names = sys.argv[1], sys.argv[2:] or list(CASES)
    host_cluster.enter_sandbox(("ip", "tc"))
    with tempfile.TemporaryDirectory() as folder:
        bed = host_cluster.HostCluster(2, folder)
        for name in names:
            CASES[name](bed, binary)


main()
