"""Jobs on a bed of hosts: ranks with torchrun's variables, or started by mpirun. Rank 0 says "ready", waits for a line, and answers in JSON."""

import json
import os
import select
import subprocess
import time

import host_cluster

LIMIT_S = 240  # for one job
PORT = 29500  # on hosts that nobody else is on


def places(hosts, ranks_per_host, order):
    """The host, from 1, of each rank."""
    ranks = hosts * ranks_per_host
    return [1 + (rank // ranks_per_host if order == "contiguous" else rank % hosts) for rank in range(ranks)]


class Job:
    """Ranks that have been started; rank 0 talks."""

    def __init__(self, bed, where, words, env, stderr=None):
        local = {}
        common = {
            "WORLD_SIZE": len(where),
            "MASTER_ADDR": f"{host_cluster.SUBNET}{where[0]}",
            "MASTER_PORT": PORT,
            "OMP_NUM_THREADS": 1,
            **env,
        }
        self.processes = []
        for rank, host in enumerate(where):
            place = local[host] = local.get(host, -1) + 1
            variables = {
                **os.environ,
                **{key: str(value) for key, value in common.items()},
                "RANK": str(rank),
                "LOCAL_RANK": str(place),
                "LOCAL_WORLD_SIZE": str(where.count(host)),
            }
            self.processes.append(
                bed.start(
                    host,
                    words,
                    env=variables,
                    stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=stderr,
                    text=True,
                )
            )
        self.talks = self.processes[0]
        self.deadline = time.monotonic() + LIMIT_S

    def line(self):
        while True:
            left = self.deadline - time.monotonic()
            if left <= 0 or not select.select([self.talks.stdout], [], [], left)[0]:
                raise RuntimeError(f"no answer within {LIMIT_S} s")
            text = self.talks.stdout.readline()
            if text == "":
                raise RuntimeError("a job ended before it had measured")
            if text.startswith(("ready", "{")):
                return text

    def wait_until_ready(self):
        if not self.line().startswith("ready"):
            raise RuntimeError("the job answered before it was asked")

    def go(self):
        self.talks.stdin.write("go\n")
        self.talks.stdin.flush()

    def end(self):
        for process in self.processes:
            if process.wait(timeout=60) != 0:
                raise RuntimeError(f"a rank ended with {process.returncode}")

    def stop(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


class MpiJob(Job):
    """The same, started by mpirun, which starts its daemons on the hosts by way of namespaces."""

    def __init__(self, bed, where, words, env, stderr=None):
        hosts = sorted(set(where))
        slots = ",".join(f"h{host}:{where.count(host)}" for host in hosts)
        by_node = [] if where == sorted(where) else ["--map-by", "node"]
        exports = [word for key, value in env.items() for word in ("-x", f"{key}={value}")]
        self.processes = [
            subprocess.Popen(
                [
                    "mpirun",
                    "--allow-run-as-root",
                    "--mca",
                    "plm_rsh_agent",
                    bed.remote_shell(),
                    "--mca",
                    "btl_tcp_if_include",
                    f"{host_cluster.SUBNET}0/24",
                    "--mca",
                    "oob_tcp_if_include",
                    f"{host_cluster.SUBNET}0/24",
                    "--bind-to",
                    "none",
                    "-H",
                    slots,
                    *by_node,
                    "-x",
                    "OMP_NUM_THREADS=1",
                    "-x",
                    "LSAN_OPTIONS=detect_leaks=0",  # for a build with a sanitizer: Open MPI's plugins leak, and are gone when it looks
                    *exports,
                    "-np",
                    str(len(where)),
                    *map(str, words),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        ]
        self.talks = self.processes[0]
        self.deadline = time.monotonic() + LIMIT_S

    def stop(self):
        # Asked, it ends its daemons and ranks; killed, it would leave them.
        if self.processes[0].poll() is None:
            self.processes[0].terminate()
            try:
                self.processes[0].wait(timeout=20)
            except subprocess.TimeoutExpired:
                pass
        super().stop()


def run(bed, job_type, where, words, env, phases=1):
    """The answer, and the bytes of the busiest direction of a host in the last phase."""
    job = job_type(bed, where, words, env)
    try:
        for _ in range(phases - 1):
            job.wait_until_ready()
            job.go()
        job.wait_until_ready()
        before = [bed.bytes_of(host) for host in sorted(set(where))]
        job.go()
        answer = json.loads(job.line())
        after = [bed.bytes_of(host) for host in sorted(set(where))]
        job.end()
        crossed = max(b - a for first, last in zip(before, after) for a, b in zip(first, last))
        return answer, crossed
    finally:
        job.stop()
