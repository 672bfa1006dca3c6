#!/usr/bin/env python3
"""Injects faults between hosts, which are network namespaces, at random points of a training, and checks how it ends.

Usage: chaos_hosts.py --program PATH_OF_TRAIN_PROBE [--runs N] [--hosts N] [--ranks-per-host N] [--seed N]
                      [--only NAME,...] [--transport NAME] [--mpi]
The script starts the ranks with the variables of torchrun, or with --mpi by mpirun; no launcher of Lockstep monitors
them. As in chaos.py, each rank writes a history file. A run passes if
  - after a fault that ends the job, each surviving rank ends within 10 s with an error that names the ranks that it
    cannot reach;
  - after any other fault, all ranks finish;
  - for each step all ranks have the same hash, that of a run without a fault, and no sample was drawn twice in an
    epoch;
  - no process is left.
The exit code is 1 if a run failed, and 77 if the machine lacks what the script requires.
"""

import argparse
import collections
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import fault_table  # noqa: E402
import history  # noqa: E402
import host_cluster  # noqa: E402
from cluster_job import Job, MpiJob, hosts_of_ranks  # noqa: E402
from tagged_processes import find_tagged, kill_tagged  # noqa: E402

MARK = "LOCKSTEP_TEST_CHAOS"
STEPS = 400
WARM_UP_STEPS = 25  # before a fault
LIMIT_S = 240
# `causes`: of ranks on the host of the victim, and of the others; None if the job continues. `within_s`: time until all
# ranks have ended. `reported_under_mpirun`: the least number of ranks that receive an error under mpirun, which may end
# ranks after the fault or after the first rank that exits, before they receive it.
FaultPlan = collections.namedtuple(
    "FaultPlan",
    "disturb undo causes within_s words limit_s env reported_under_mpirun",
    defaults=(None, None, None, 0, [], LIMIT_S, {}, None),
)


class Run:
    def __init__(self, args, cluster, plan, victim, rng):
        self.args, self.cluster, self.plan, self.victim, self.rng = args, cluster, plan, victim, rng
        self.where = hosts_of_ranks(args.hosts, args.ranks_per_host, "contiguous")
        self.mark = f"{os.getpid()}.{rng.randrange(1 << 48)}"

    def judge(self, reference):
        """Runs the job. Returns (errors, seconds until all ranks had an error, seconds until all had ended)."""
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            env = {
                MARK: self.mark,
                "LOCKSTEP_LOG": "quiet",
                "LOCKSTEP_TRANSPORT": self.args.transport,
                "LOCKSTEP_KEY_FILE": self.args.key,
                **self.plan.env,
            }
            words = [self.args.program, "chaos", folder, STEPS, *self.plan.words]
            job = (MpiJob if self.args.mpi else Job)(self.cluster, self.where, words, env, stderr=subprocess.DEVNULL)
            try:
                began_ns = self.disturb(folder)
                ended_s = self.wait_for_ends(job, began_ns)
                return self.check(folder, reference, began_ns, ended_s)
            finally:
                if self.plan.undo:
                    self.plan.undo()
                job.stop()
                kill_tagged(MARK, self.mark)

    def disturb(self, folder):
        limit = time.monotonic() + 60
        while (
            time.monotonic() < limit
            and min(len(history.read(folder, rank)) for rank in range(len(self.where))) <= WARM_UP_STEPS
        ):
            time.sleep(0.01)
        time.sleep(self.rng.uniform(0, 0.7))
        began_ns = time.monotonic_ns()
        if self.plan.disturb:
            self.plan.disturb(self, folder)
        return began_ns

    def wait_for_ends(self, job, began_ns):
        """Blocks until all ranks have ended. Returns the seconds since the fault, or None at the deadline."""
        limit = time.monotonic() + self.plan.limit_s
        while time.monotonic() < limit:
            for process in job.processes:
                process.poll()
            if not self.ranks_alive():
                return (time.monotonic_ns() - began_ns) / 1e9
            time.sleep(0.02)
        return None

    def ranks_alive(self):
        """Returns the tagged processes that run the program and are not zombies."""
        alive = []
        for pid in find_tagged(MARK, self.mark):
            try:
                if os.path.basename(os.readlink(f"/proc/{pid}/exe")) == os.path.basename(self.args.program):
                    alive.append(pid)
            except OSError:
                pass
        return alive

    def check(self, folder, reference, began_ns, ended_s):
        histories = [history.read(folder, rank) for rank in range(len(self.where))]
        wrong = history.check_hashes(histories, reference) + history.check_samples(histories, self.plan.causes is None)
        if ended_s is None:
            return wrong + [f"not ended after {self.plan.limit_s} s"], None, None
        if self.plan.causes is None:
            unfinished = [
                f"rank {rank} did not finish: {errors_in(lines)}"
                for rank, lines in enumerate(histories)
                if not any("done" in line for line in lines)
            ]
            return wrong + unfinished, None, ended_s
        reported_s = None
        for rank, lines in enumerate(histories):
            if rank == self.victim and self.plan.causes.get("victim") is None:
                continue
            near = self.where[rank] == self.where[self.victim]
            errors = [line for line in lines if "error_cause" in line]
            if not errors and self.args.mpi and self.plan.reported_under_mpirun is not None:
                continue
            expected = self.plan.causes["near" if near else "far"]
            first = f"{errors[0]['error_cause']} {errors[0]['error_text']}" if errors else ""
            if not re.search(expected(self, rank), first):
                wrong.append(f"rank {rank} received {errors_in(lines)}")
                continue
            reported_s = max(reported_s or 0, (errors[0]["ns"] - began_ns) / 1e9)
        if reported_s is None and self.plan.reported_under_mpirun != 0:
            wrong.append("no rank received an error")
        if ended_s > self.plan.within_s:
            wrong.append(f"ended after {ended_s:.2f} s")
        return wrong, reported_s, ended_s

    def pid_of_victim(self, folder):
        return history.read(folder, self.victim)[0]["pid"]


def errors_in(lines):
    """Returns the causes and texts of the errors in a history."""
    return [(line["error_cause"], line["error_text"]) for line in lines if "error_cause" in line]


def others_of(run, rank):
    """Returns the ranks on other hosts, as messages list them."""
    return ",".join(str(other) for other, host in enumerate(run.where) if host != run.where[rank])


def plan_for(name, args, cluster):
    host = args.hosts  # rank 0, which serves the store, is on the first one
    unreachable = lambda run, rank: rf"^(PEER_UNREACHABLE|COORDINATOR_LOST) .*\b{others_of(run, rank)}\b"
    both = {"victim": True, "near": unreachable, "far": unreachable}
    dead = lambda run, rank: rf"^PEER_UNREACHABLE .*rank {run.victim} "

    def kill(number):
        return lambda run, folder: os.kill(run.pid_of_victim(folder), number)

    def pause(run, folder):
        kill(signal.SIGSTOP)(run, folder)
        time.sleep(3)
        kill(signal.SIGCONT)(run, folder)

    def short_cut(run, folder):
        cluster.cut(host)
        time.sleep(2)
        cluster.heal(host)

    plans = {
        "kill": FaultPlan(kill(signal.SIGKILL), None, {"near": dead, "far": dead}, 5, reported_under_mpirun=0),
        "pause": FaultPlan(pause),
        "cut": FaultPlan(lambda run, folder: cluster.cut(host), lambda: cluster.heal(host), both, 10),
        "cut_to": FaultPlan(
            lambda run, folder: cluster.cut_one_way(1, host),
            lambda: cluster.heal_one_way(1, host),
            both,
            10,
            reported_under_mpirun=1,
        ),
        "cut_from": FaultPlan(
            lambda run, folder: cluster.cut_one_way(host, 1),
            lambda: cluster.heal_one_way(host, 1),
            both,
            10,
            reported_under_mpirun=1,
        ),
        "short_cut": FaultPlan(short_cut),
        # 10 min on a link where each of the last five steps takes longer than the deadline of ranks without progress.
        "slow": FaultPlan(
            lambda run, folder: cluster.shape("1mbit", [host]),
            lambda: cluster.unshape([host]),
            words=["heavy", "0", str(STEPS - 5)],
            limit_s=1200,
            env={"LOCKSTEP_TIMEOUT": "60"},
        ),
    }
    return plans[name]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True, type=os.path.abspath)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", default="kill,pause,cut,cut_to,cut_from,short_cut,slow")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--mpi", action="store_true")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 32)
    if not os.environ.get(host_cluster.IN_SANDBOX):
        sys.argv += ["--seed", str(seed)]  # the script restarts in a sandbox
        ranks = f"{args.hosts} hosts x {args.ranks_per_host} ranks"
        print(f"seed {seed}, {ranks}, transport {args.transport}{' by mpirun' if args.mpi else ''}", flush=True)
    host_cluster.enter_sandbox(("ip", "tc", *(["mpirun"] if args.mpi else [])))
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        args.key = f"{folder}/key"
        with open(os.open(args.key, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as key:
            key.write(rng.randbytes(32))
        sys.exit(1 if run_all(args, host_cluster.HostCluster(args.hosts, folder), rng) else 0)


def run_all(args, cluster, rng):
    class Reference(Run):
        def check(self, folder, reference, began_ns, ended_s):
            self.hashes = {line["step"]: line["hash"] for line in history.steps(history.read(folder, 0))}
            return super().check(folder, self.hashes, began_ns, ended_s)

    def reference_of(plan):
        undisturbed = Reference(args, cluster, plan._replace(disturb=None, undo=None, causes=None), 0, rng)
        wrong, _, _ = undisturbed.judge(None)
        if wrong:
            sys.exit(f"without a fault: {wrong}")
        return undisturbed.hashes

    ranks = args.hosts * args.ranks_per_host
    references = {}  # by the arguments of the ranks

    def one(name):
        plan = plan_for(name, args, cluster)
        words = tuple(plan.words)
        references[words] = references.get(words) or reference_of(plan)
        # Rank 0 serves the store: its death is a different fault.
        victim = rng.randrange(1, ranks) if name in ("kill", "pause") else ranks - 1
        return victim, *Run(args, cluster, plan, victim, rng).judge(references[words])

    return fault_table.run_all(args.only.split(","), lambda name: 1 if name == "slow" else args.runs, one)


main()
