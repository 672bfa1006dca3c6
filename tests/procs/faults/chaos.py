#!/usr/bin/env python3
"""Injects faults at random points of a training on several ranks, and checks how the job ends.

Usage: chaos.py --lockstep PATH --program PATH_OF_TRAIN_PROBE [--runs N] [--ranks N] [--seed N] [--only NAME,...]
                [--transport NAME,...]
Each rank writes a history file: a hash of its parameters after each step, and the error that it received, with the
time. A run passes if
  - the launcher ends in time, with code 0, or with exactly one FATAL line, the last one, with the right cause and rank;
  - each surviving rank received the same cause within a second of the moment at which the fault was detectable;
  - for each step all ranks have the same hash, that of a run without a fault, as far as they ran (no wrong sum was
    applied), and no sample was drawn twice in an epoch;
  - nothing is left: no process, no file in its folder for temporary files, nothing in /dev/shm.
Prints the seed, a line for each failed run, and a table. The exit code is 1 if a run failed.
"""

import argparse
import collections
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import fault_table  # noqa: E402
import history  # noqa: E402
from tagged_processes import find_tagged, kill_tagged  # noqa: E402

MARK = "LOCKSTEP_TEST_CHAOS"
REPORT_LIMIT_S = 1.0
STEPS = 400  # 2 s and more
WARM_UP_STEPS = 25  # before a fault
# `after`: the number of steps of the victim before the fault. `place`: a regular expression that the FATAL line must
# match. `busy`: a rank that runs its own code at the time of the fault, and therefore receives no error.
FaultPlan = collections.namedtuple(
    "FaultPlan",
    "options words disturb cause code reported_s ended_s after place env busy",
    defaults=(WARM_UP_STEPS, "", {}, None),
)
FAKE_HOSTS = pathlib.Path(__file__).resolve().parents[2] / "support/fake_hosts.sh"
LIBFAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"  # Debian: libfaketime
DESYNCS = ("skip", "extra", "order", "shape", "dtype", "kind", "name")


class Run:
    """One job, and the time of its fault."""

    def __init__(self, args, transport, plan, victim, rng):
        self.args, self.transport, self.plan, self.victim, self.rng = args, transport, plan, victim, rng
        self.mark = f"{os.getpid()}.{rng.randrange(1 << 48)}"
        self.fault_ns = None

    def fake_hosts(self):
        """Returns a command under which half of the ranks run as if on another host, for a transport between hosts."""
        if self.transport != "hierarchy":
            return []
        return [FAKE_HOSTS, " ".join(str(2 * rank // self.args.ranks) for rank in range(self.args.ranks))]

    def judge(self, reference):
        """Runs the job. Returns (errors, seconds until all ranks had the cause, seconds until the launcher ended)."""
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "tmp").mkdir()
            shm = in_dev_shm()
            command = [self.args.lockstep, "run", "-n", str(self.args.ranks), "--bind", "none", *self.plan.options]
            command += ["--transport", self.transport, "--", *self.fake_hosts()]
            command += [self.args.program, "chaos", str(folder), str(STEPS), *self.plan.words]
            (folder / "clock").write_text("+0\n")
            env = {
                **os.environ,
                MARK: self.mark,
                "TMPDIR": str(folder / "tmp"),
                "OMP_NUM_THREADS": "1",
                "FAKETIME_TIMESTAMP_FILE": str(folder / "clock"),
                **self.plan.env,
            }
            job = subprocess.Popen(
                command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            try:
                self.disturb(folder)
                try:
                    _, err = job.communicate(timeout=60)
                except subprocess.TimeoutExpired:
                    return ["the launcher did not end in 60 s"], None, None
                ended_ns = time.monotonic_ns()
                histories = [history.read(folder, rank) for rank in range(self.args.ranks)]
                wrong, reported_s = self.check_histories(histories, reference)
                ended_s = (ended_ns - self.time_of_fault(histories)) / 1e9 if self.plan.cause else 0
                wrong += self.check_end(job.returncode, err, ended_s)
                left = (
                    list(find_tagged(MARK, self.mark)) + list((folder / "tmp").iterdir()) + sorted(in_dev_shm() - shm)
                )
                if left:
                    wrong.append(f"left: {left}")
                return wrong, reported_s, ended_s
            finally:
                kill_tagged(MARK, self.mark)
                job.wait()

    def disturb(self, folder):
        """Disturbs the victim at a random time after the first steps."""
        if not self.plan.disturb:
            return
        limit = time.monotonic() + 30
        while time.monotonic() < limit and len(history.read(folder, self.victim)) <= self.plan.after:
            time.sleep(0.01)
        time.sleep(self.rng.uniform(0, 0.7) if not self.plan.place.startswith("op=") else self.rng.uniform(0.5, 1.5))
        pid = history.read(folder, self.victim)[0]["pid"]
        self.fault_ns = time.monotonic_ns()
        self.plan.disturb(pid, folder)

    def time_of_fault(self, histories):
        """Returns when the fault was injected from outside, or else when the victim last wrote a step."""
        if self.fault_ns is not None:
            return self.fault_ns
        return max((line["ns"] for line in histories[self.victim] if "error_cause" not in line), default=0)

    def check_histories(self, histories, reference):
        # REPLICA_DIVERGED means that a difference between the hashes was injected.
        wrong = [] if self.plan.cause == "REPLICA_DIVERGED" else history.check_hashes(histories, reference)
        wrong += history.check_samples(histories, not self.plan.cause)
        reported_s = None
        for rank, lines in enumerate(histories):
            errors = [line for line in lines if "error_cause" in line]
            done = any("done" in line for line in lines)
            if not self.plan.cause:
                if not done:
                    wrong.append(f"rank {rank} did not finish")
            elif rank != self.plan.busy and (rank != self.victim or self.plan.cause == "DESYNC"):
                causes = [line["error_cause"] for line in errors]
                if causes != [self.plan.cause]:
                    wrong.append(f"rank {rank} received {causes}")
                for line in errors:
                    reported_s = max(reported_s or 0, (line["ns"] - self.time_of_fault(histories)) / 1e9)
                    if self.plan.cause == "DESYNC" and (
                        f"rank {self.victim} " not in line["error_text"]
                        or len(set(re.findall(r"\brank (\d+)", line["error_text"]))) < 2
                    ):
                        wrong.append(f"rank {rank} received: {line['error_text']}")
        if reported_s is not None and reported_s > self.plan.reported_s:
            wrong.append(f"ranks had the cause after {reported_s:.2f} s")
        return wrong, reported_s

    def check_end(self, code, err, ended_s):
        fatal = re.findall(r"^FATAL cause=(\w+) rank=(\S+)", err, re.M)
        wrong = []
        if code != self.plan.code:
            wrong.append(f"exit code {code}")
        if not self.plan.cause:
            return wrong + ([f"FATAL lines: {fatal}"] if fatal else [])
        expected = [(self.plan.cause, str(self.victim))]
        # The detail names two ranks. With two, there is no majority by which to find the wrong one.
        if self.plan.cause == "DESYNC":
            fatal, expected = [cause for cause, _ in fatal], ["DESYNC"]
            if f"rank {self.victim} " not in err.rstrip().rsplit("\n", 1)[-1]:
                wrong.append("the FATAL line does not name the rank")
        if fatal != expected or not err.rstrip("\n").rsplit("\n", 1)[-1].startswith("FATAL "):
            wrong.append(f"FATAL lines: {fatal}; the last line is {err.rstrip().rsplit(chr(10), 1)[-1][:300]}")
        if not re.search(self.plan.place, err.rstrip().rsplit("\n", 1)[-1]):
            wrong.append(
                f"the FATAL line does not have the place of the rank: {err.rstrip().rsplit(chr(10), 1)[-1][:300]}"
            )
        if ended_s > self.plan.ended_s:
            wrong.append(f"ended after {ended_s:.2f} s")
        return wrong


def pause(pid, _):
    os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(pid, signal.SIGCONT)


def in_dev_shm():
    """Returns the files in /dev/shm, except those of Open MPI and libfaketime, which belong to other jobs."""
    others = ("vader_segment.", "faketime_shm_", "sem.faketime_sem_")
    return {name for name in os.listdir("/dev/shm") if not name.startswith(others)}


def set_clocks(_, folder):
    """Sets the clocks of all processes of the job one hour forward, and then two hours back."""
    for clock in ("+3600", "-3600"):
        (folder / "clock").write_text(clock + "\n")
        time.sleep(0.5)


def plan_for(name, victim, rng, args):
    step = rng.randrange(WARM_UP_STEPS, 100)
    inject = lambda kind: ["--inject", f"{kind}@rank={victim},step={step}"]
    kill = lambda number: lambda pid, _: os.kill(pid, number)
    limits = ["--hang-timeout", "10", "--stall-timeout", "10"]
    if name == "none":
        return FaultPlan([], [], None, None, 0, 0, 0)
    if name == "kill":
        return FaultPlan(
            [],
            [],
            kill(signal.SIGKILL),
            "RANK_DIED",
            137,
            REPORT_LIMIT_S,
            5,
            place=r" op=\w+\S*#\d+ |the last operation that it finished was \w+\S*#\d+ of ",
        )
    if name == "kill_in_wait":  # while it waits in an all_reduce for a late rank
        late = rng.choice([rank for rank in range(args.ranks) if rank != victim])
        return FaultPlan(
            [],
            ["late", str(late), str(step)],
            kill(signal.SIGKILL),
            "RANK_DIED",
            137,
            REPORT_LIMIT_S,
            5,
            after=step,
            place=r"op=all_reduce\(votes\)#\d+ ",
            busy=late,
        )
    if name == "pause":
        return FaultPlan([], [], pause, None, 0, 0, 0)
    if name == "clock":
        return FaultPlan(
            [],
            [],
            set_clocks,
            None,
            0,
            0,
            0,
            env={"LD_PRELOAD": LIBFAKETIME, "DONT_FAKE_MONOTONIC": "1", "FAKETIME_NO_CACHE": "1"},
        )
    if name == "stop":  # both timeouts run, and the shorter one reports
        return FaultPlan(
            ["--hang-timeout", "30", "--stall-timeout", "10"], [], kill(signal.SIGSTOP), "RANK_STALLED", 124, 13, 15
        )
    if name == "loop":
        return FaultPlan(limits, [], None, "RANK_STUCK", 124, 13, 15)._replace(
            options=["--work-timeout", "10", *inject("loop")]
        )
    if name == "deadlock":
        return FaultPlan(limits, ["deadlock", str(victim), str(step)], None, "RANK_STUCK", 124, 13, 15)
    if name == "throw":
        return FaultPlan(inject("throw"), [], None, "RANK_EXITED", 1, REPORT_LIMIT_S, 5)
    if name == "segv":
        return FaultPlan(inject("segv"), [], None, "RANK_DIED", 139, REPORT_LIMIT_S, 5)
    if name == "flip":
        return FaultPlan(inject("flip"), [], None, "REPLICA_DIVERGED", 70, 60, 60)
    if name == "desync":
        return FaultPlan([], [rng.choice(DESYNCS), str(victim), str(step)], None, "DESYNC", 70, REPORT_LIMIT_S, 5)
    sys.exit(f"--only: unknown fault {name}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True, type=os.path.abspath)
    parser.add_argument("--program", required=True, type=os.path.abspath)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", default="kill,kill_in_wait,pause,stop,loop,deadlock,throw,segv,flip,desync,clock")
    parser.add_argument("--transport", default="shm,tcp,hierarchy")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}, {args.ranks} ranks", flush=True)
    rng = random.Random(seed)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    names = args.only.split(",")
    if "clock" in names and not os.path.exists(LIBFAKETIME):
        print("clock: SKIPPED: libfaketime is not installed")
        names.remove("clock")
    bad = sum(run_all(args, transport, names, rng) for transport in args.transport.split(","))
    sys.exit(1 if bad else 0)


def run_all(args, transport, names, rng):
    class Reference(Run):
        def check_histories(self, histories, reference):
            self.hashes = {line["step"]: line["hash"] for line in histories[0] if "hash" in line}
            return super().check_histories(histories, self.hashes)

    print(f"transport {transport}", flush=True)
    undisturbed = Reference(args, transport, plan_for("none", 0, rng, args), 0, rng)
    wrong, _, _ = undisturbed.judge(None)
    if wrong:
        sys.exit(f"without a fault: {wrong}")

    def one(name):
        victim = rng.randrange(args.ranks)
        return victim, *Run(args, transport, plan_for(name, victim, rng, args), victim, rng).judge(undisturbed.hashes)

    return fault_table.run_all(names, lambda _: args.runs, one)


main()
