#!/usr/bin/env python3
"""Faults between hosts, as network namespaces, at random moments of a training on several ranks, again and again; a table of what became of them.

usage: chaos_hosts.py --program PATH [--runs N] [--hosts N] [--ranks-per-host N] [--seed N] [--only NAME,...] [--transport NAME] [--mpi]
Ranks are started with torchrun's variables by hand, or with --mpi by mpirun; no launcher of ours watches them. As in chaos.py every rank writes what it has
done. A run is good when
  - of a fault that ends the job every rank that lived ends within 10 s with an error that names the ranks that it cannot reach;
  - of one that does not, all ranks finish;
  - for each step all ranks have the same hash, that of a run without a fault, and no sample was drawn twice in an epoch;
  - no process is left.
Exit code 77: skipped.
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

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))
import history  # noqa: E402
import host_cluster  # noqa: E402
import tally  # noqa: E402
from cluster_job import Job, MpiJob, places  # noqa: E402
from marked import marked  # noqa: E402

MARK = "LOCKSTEP_TEST_CHAOS"
STEPS = 400
EDGE = 25
LIMIT_S = 90
# `causes`: of a rank of the victim's host, and of the others; none: the job goes on. `within_s`: until all ranks have ended.
# `reported_under_mpirun`: mpirun sees the fault or the first rank that ends by it, and then ends the others, which may be before they are told; so many are.
FaultPlan = collections.namedtuple(
    "FaultPlan",
    "disturb undo causes within_s words limit_s env reported_under_mpirun",
    defaults=(None, None, None, 0, [], LIMIT_S, {}, None),
)


class Run:
    def __init__(self, args, bed, plan, victim, rng):
        self.args, self.bed, self.plan, self.victim, self.rng = args, bed, plan, victim, rng
        self.where = places(args.hosts, args.ranks_per_host, "contiguous")
        self.mark = f"{os.getpid()}.{rng.randrange(1 << 48)}"

    def judge(self, reference):
        """(what is wrong, seconds until all were told, seconds until all had ended)"""
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
            job = (MpiJob if self.args.mpi else Job)(self.bed, self.where, words, env, stderr=subprocess.DEVNULL)
            try:
                began_ns = self.disturb(folder)
                ended_s = self.wait_for_ends(job, began_ns)
                return self.check(folder, reference, began_ns, ended_s)
            finally:
                if self.plan.undo:
                    self.plan.undo()
                job.stop()
                for pid in marked(MARK, self.mark):
                    os.kill(pid, signal.SIGKILL)

    def disturb(self, folder):
        limit = time.monotonic() + 60
        while (
            time.monotonic() < limit and min(len(history.read(folder, rank)) for rank in range(len(self.where))) <= EDGE
        ):
            time.sleep(0.01)
        time.sleep(self.rng.uniform(0, 0.7))
        began_ns = time.monotonic_ns()
        if self.plan.disturb:
            self.plan.disturb(self, folder)
        return began_ns

    def wait_for_ends(self, job, began_ns):
        """Seconds until no rank was there any more; None when some stay."""
        limit = time.monotonic() + self.plan.limit_s
        while time.monotonic() < limit:
            for process in job.processes:
                process.poll()
            if not self.ranks_alive():
                return (time.monotonic_ns() - began_ns) / 1e9
            time.sleep(0.02)
        return None

    def ranks_alive(self):
        """Marked processes that are no zombie and that run the program itself."""
        alive = []
        for pid in marked(MARK, self.mark):
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
                f"rank {rank} did not finish: {[(line['told'], line['text']) for line in lines if 'told' in line]}"
                for rank, lines in enumerate(histories)
                if not any("done" in line for line in lines)
            ]
            return wrong + unfinished, None, ended_s
        reported_s = None
        for rank, lines in enumerate(histories):
            if rank == self.victim and self.plan.causes.get("victim") is None:
                continue
            near = self.where[rank] == self.where[self.victim]
            told = [line for line in lines if "told" in line]
            if not told and self.args.mpi and self.plan.reported_under_mpirun is not None:
                continue
            expected = self.plan.causes["near" if near else "far"]
            if not told or not re.search(expected(self, rank), told[0]["told"] + " " + told[0]["text"]):
                wrong.append(f"rank {rank} was told {[(line['told'], line['text']) for line in told]}")
                continue
            reported_s = max(reported_s or 0, (told[0]["ns"] - began_ns) / 1e9)
        if reported_s is None and self.plan.reported_under_mpirun != 0:
            wrong.append("no rank was told")
        if ended_s > self.plan.within_s:
            wrong.append(f"ended after {ended_s:.2f} s")
        return wrong, reported_s, ended_s

    def pid_of_victim(self, folder):
        return history.read(folder, self.victim)[0]["pid"]


def others_of(run, rank):
    """The numbers of the ranks on other hosts, as messages list them."""
    return ",".join(str(other) for other, host in enumerate(run.where) if host != run.where[rank])


def plan_for(name, args, bed):
    host = args.hosts  # rank 0, which serves the store, is on the first
    unreachable = lambda run, rank: rf"^(PEER_UNREACHABLE|COORDINATOR_LOST) .*\b{others_of(run, rank)}\b"
    both = {"victim": True, "near": unreachable, "far": unreachable}
    dead = lambda run, rank: rf"^PEER_UNREACHABLE .*rank {run.victim} "

    def kill(number):
        return lambda run, folder: os.kill(run.pid_of_victim(folder), number)

    def pause(run, folder):
        kill(signal.SIGSTOP)(run, folder)
        time.sleep(3)
        kill(signal.SIGCONT)(run, folder)

    def blink(run, folder):
        bed.cut(host)
        time.sleep(2)
        bed.heal(host)

    plans = {
        "kill": FaultPlan(kill(signal.SIGKILL), None, {"near": dead, "far": dead}, 5, reported_under_mpirun=0),
        "pause": FaultPlan(pause),
        "cut": FaultPlan(lambda run, folder: bed.cut(host), lambda: bed.heal(host), both, 10),
        "cut_to": FaultPlan(
            lambda run, folder: bed.cut_one_way(1, host),
            lambda: bed.heal_one_way(1, host),
            both,
            10,
            reported_under_mpirun=1,
        ),
        "cut_from": FaultPlan(
            lambda run, folder: bed.cut_one_way(host, 1),
            lambda: bed.heal_one_way(host, 1),
            both,
            10,
            reported_under_mpirun=1,
        ),
        "blink": FaultPlan(blink),
        # 10 min on a link on which each of the last five steps takes longer than a rank waits for others that do not get on.
        "slow": FaultPlan(
            lambda run, folder: bed.shape("1mbit", [host]),
            lambda: bed.unshape([host]),
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
    parser.add_argument("--only", default="kill,pause,cut,cut_to,cut_from,blink,slow")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--mpi", action="store_true")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 32)
    if not os.environ.get(host_cluster.IN_SANDBOX):
        sys.argv += ["--seed", str(seed)]  # it starts again in its cell
        print(
            f"seed {seed}, {args.hosts} hosts x {args.ranks_per_host} ranks, transport {args.transport}{' by mpirun' if args.mpi else ''}",
            flush=True,
        )
    host_cluster.enter_sandbox(("ip", "tc", *(["mpirun"] if args.mpi else [])))
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        args.key = f"{folder}/key"
        with open(os.open(args.key, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as key:
            key.write(rng.randbytes(32))
        sys.exit(1 if run_all(args, host_cluster.HostCluster(args.hosts, folder), rng) else 0)


def run_all(args, bed, rng):
    class Reference(Run):
        def check(self, folder, reference, began_ns, ended_s):
            self.hashes = {line["step"]: line["hash"] for line in history.steps(history.read(folder, 0))}
            return super().check(folder, self.hashes, began_ns, ended_s)

    def reference_of(plan):
        undisturbed = Reference(args, bed, plan._replace(disturb=None, undo=None, causes=None), 0, rng)
        wrong, _, _ = undisturbed.judge(None)
        if wrong:
            sys.exit(f"without a fault: {wrong}")
        return undisturbed.hashes

    ranks = args.hosts * args.ranks_per_host
    references = {}  # by what the ranks do

    def one(name):
        plan = plan_for(name, args, bed)
        words = tuple(plan.words)
        references[words] = references.get(words) or reference_of(plan)
        # Rank 0 serves the store: without a launcher its death is another fault.
        victim = rng.randrange(1, ranks) if name in ("kill", "pause") else ranks - 1
        return victim, *Run(args, bed, plan, victim, rng).judge(references[words])

    return tally.run_all(args.only.split(","), lambda name: 1 if name == "slow" else args.runs, one)


main()
