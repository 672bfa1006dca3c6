"""Jobs on a HostCluster: ranks with torchrun's variables, or started by mpirun.

Rank 0 prints "ready", waits for a line on stdin, and prints its result as JSON.
"""

import json
import os
import select
import subprocess
import time

import host_cluster

LIMIT_S = 240  # for one job
PORT = 29500  # a fixed port: the hosts are network namespaces without other programs


def hosts_of_ranks(hosts, ranks_per_host, order):
    """Returns the host, from 1, of each rank."""
    ranks = hosts * ranks_per_host
    return [1 + (rank // ranks_per_host if order == "contiguous" else rank % hosts) for rank in range(ranks)]


class Job:
    """Starts the ranks. Only the output of rank 0 is read."""

    def __init__(self, cluster, where, words, env, stderr=None):
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
            local_rank = local[host] = local.get(host, -1) + 1
            variables = {
                **os.environ,
                **{key: str(value) for key, value in common.items()},
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(where.count(host)),
            }
            self.processes.append(
                cluster.start(
                    host,
                    words,
                    env=variables,
                    stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=stderr,
                    text=True,
                )
            )
        self.rank_zero = self.processes[0]
        self.deadline = time.monotonic() + LIMIT_S

    def line(self):
        while True:
            remaining = self.deadline - time.monotonic()
            if remaining <= 0 or not select.select([self.rank_zero.stdout], [], [], remaining)[0]:
                raise RuntimeError(f"no answer within {LIMIT_S} s")
            text = self.rank_zero.stdout.readline()
            if text == "":
                raise RuntimeError("the job ended without a result")
            if text.startswith(("ready", "{")):
                return text

    def wait_until_ready(self):
        if not self.line().startswith("ready"):
            raise RuntimeError("the job printed its result before the start signal")

    def go(self):
        self.rank_zero.stdin.write("go\n")
        self.rank_zero.stdin.flush()

    def end(self):
        for process in self.processes:
            if process.wait(timeout=60) != 0:
                raise RuntimeError(f"a rank exited with {process.returncode}")

    def stop(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


class MpiJob(Job):
    """The same, started by mpirun, which starts its daemons on the hosts by entering their namespaces."""

    def __init__(self, cluster, where, words, env, stderr=None):
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
                    cluster.remote_shell(),
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
                    # For a build with a sanitizer: Open MPI's plugins leak, and are unloaded before LSan checks.
                    "LSAN_OPTIONS=detect_leaks=0",
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
        self.rank_zero = self.processes[0]
        self.deadline = time.monotonic() + LIMIT_S

    def stop(self):
        # On SIGTERM mpirun ends its daemons and ranks; after SIGKILL they would remain.
        if self.processes[0].poll() is None:
            self.processes[0].terminate()
            try:
                self.processes[0].wait(timeout=20)
            except subprocess.TimeoutExpired:
                pass
        super().stop()


def run(cluster, job_type, where, words, env, phases=1):
    """Returns rank 0's result, and the byte count of the busiest direction of any host in the last phase."""
    job = job_type(cluster, where, words, env)
    try:
        for _ in range(phases - 1):
            job.wait_until_ready()
            job.go()
        job.wait_until_ready()
        before = [cluster.bytes_of(host) for host in sorted(set(where))]
        job.go()
        answer = json.loads(job.line())
        after = [cluster.bytes_of(host) for host in sorted(set(where))]
        job.end()
        crossed = max(b - a for first, last in zip(before, after) for a, b in zip(first, last))
        return answer, crossed
    finally:
        job.stop()
