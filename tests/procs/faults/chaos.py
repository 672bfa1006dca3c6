#!/usr/bin/env python3
"""Faults at random moments of a training on several ranks, again and again; a table of what became of them.

usage: chaos.py --lockstep PATH --program PATH [--runs N] [--ranks N] [--seed N] [--only NAME,...] [--transport NAME,...]
Every rank of the program writes what it has done to a history file: a hash of its parameters after each step, what it was told when it failed, and when. A
run is good when
  - the launcher ends in time, with 0, or with exactly one FATAL line, the last one, of the right cause and the right rank;
  - every rank that lived was told the same cause within a second of the moment at which it could be known;
  - for each step all ranks have the same hash, that of a run without a fault, as far as they came (no wrong sum was ever applied), and no sample was drawn
    twice in an epoch;
  - nothing is left: no process, no file in its folder for temporary files, nothing in /dev/shm.
Prints the seed, a line a run that is not good, and the table; exit code 1 when a run was not good.
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

import history
import tally
from marked import marked

MARK = "LOCKSTEP_TEST_CHAOS"
REPORT_LIMIT_S = 1.0
STEPS = 400  # 2 s and more
EDGE = 25  # a fault comes after this many steps
# `after`: the victim has come so far when it is disturbed. `place`: what the FATAL line must say of where it was. `busy`: a rank that is in its own code then, where
# nobody can tell it anything.
FaultPlan = collections.namedtuple(
    "FaultPlan",
    "options words disturb cause code reported_s ended_s after place env busy",
    defaults=(EDGE, "", {}, None),
)
FAKE_HOSTS = pathlib.Path(__file__).resolve().parent.parent / "support/fake_hosts.sh"
LIBFAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"  # Debian: libfaketime
DESYNCS = ("skip", "extra", "order", "shape", "dtype", "kind", "name")


class Run:
    """One job, and the moment from which its fault could be known."""

    def __init__(self, args, transport, plan, victim, rng):
        self.args, self.transport, self.plan, self.victim, self.rng = args, transport, plan, victim, rng
        self.mark = f"{os.getpid()}.{rng.randrange(1 << 48)}"
        self.known_ns = None

    def fake_hosts(self):
        """For a transport between hosts half of the ranks take themselves to be on another one."""
        if self.transport != "hierarchy":
            return []
        return [FAKE_HOSTS, " ".join(str(2 * rank // self.args.ranks) for rank in range(self.args.ranks))]

    def judge(self, reference):
        """(what is wrong, seconds until all were told, seconds until the launcher had gone)"""
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
                gone_ns = time.monotonic_ns()
                histories = [history.read(folder, rank) for rank in range(self.args.ranks)]
                wrong, reported_s = self.check_histories(histories, reference)
                ended_s = (gone_ns - self.known(histories)) / 1e9 if self.plan.cause else 0
                wrong += self.check_end(job.returncode, err, ended_s)
                left = list(marked(MARK, self.mark)) + list((folder / "tmp").iterdir()) + sorted(in_dev_shm() - shm)
                if left:
                    wrong.append(f"left: {left}")
                return wrong, reported_s, ended_s
            finally:
                for pid in marked(MARK, self.mark):
                    os.kill(pid, signal.SIGKILL)
                job.wait()

    def disturb(self, folder):
        """At a random moment after the first steps."""
        if not self.plan.disturb:
            return
        limit = time.monotonic() + 30
        while time.monotonic() < limit and len(history.read(folder, self.victim)) <= self.plan.after:
            time.sleep(0.01)
        time.sleep(self.rng.uniform(0, 0.7) if not self.plan.place.startswith("op=") else self.rng.uniform(0.5, 1.5))
        pid = history.read(folder, self.victim)[0]["pid"]
        self.known_ns = time.monotonic_ns()
        self.plan.disturb(pid, folder)

    def known(self, histories):
        """When the fault happened: when we made it, else when the rank at fault last wrote."""
        if self.known_ns is not None:
            return self.known_ns
        return max((line["ns"] for line in histories[self.victim] if "told" not in line), default=0)

    def check_histories(self, histories, reference):
        # Where a replica was made to differ, that is what must be found, not what must not be.
        wrong = [] if self.plan.cause == "REPLICA_DIVERGED" else history.check_hashes(histories, reference)
        wrong += history.check_samples(histories, not self.plan.cause)
        reported_s = None
        for rank, lines in enumerate(histories):
            told = [line for line in lines if "told" in line]
            done = any("done" in line for line in lines)
            if not self.plan.cause:
                if not done:
                    wrong.append(f"rank {rank} did not finish")
            elif rank != self.plan.busy and (rank != self.victim or self.plan.cause == "DESYNC"):
                if [line["told"] for line in told] != [self.plan.cause]:
                    wrong.append(f"rank {rank} was told {[line['told'] for line in told]}")
                for line in told:
                    reported_s = max(reported_s or 0, (line["ns"] - self.known(histories)) / 1e9)
                    if self.plan.cause == "DESYNC" and (
                        f"rank {self.victim} " not in line["text"]
                        or len(set(re.findall(r"\brank (\d+)", line["text"]))) < 2
                    ):
                        wrong.append(f"rank {rank} was told: {line['text']}")
        if reported_s is not None and reported_s > self.plan.reported_s:
            wrong.append(f"told after {reported_s:.2f} s")
        return wrong, reported_s

    def check_end(self, code, err, ended_s):
        fatal = re.findall(r"^FATAL cause=(\w+) rank=(\S+)", err, re.M)
        wrong = []
        if code != self.plan.code:
            wrong.append(f"exit code {code}")
        if not self.plan.cause:
            return wrong + ([f"FATAL lines: {fatal}"] if fatal else [])
        expected = [(self.plan.cause, str(self.victim))]
        if self.plan.cause == "DESYNC":  # both are named in the text; whose mistake it was a vote of two cannot tell
            fatal, expected = [cause for cause, _ in fatal], ["DESYNC"]
            if f"rank {self.victim} " not in err.rstrip().rsplit("\n", 1)[-1]:
                wrong.append("the FATAL line does not name the rank")
        if fatal != expected or not err.rstrip("\n").rsplit("\n", 1)[-1].startswith("FATAL "):
            wrong.append(f"FATAL lines: {fatal}; the last line is {err.rstrip().rsplit(chr(10), 1)[-1][:300]}")
        if not re.search(self.plan.place, err.rstrip().rsplit("\n", 1)[-1]):
            wrong.append(f"the FATAL line does not say where the rank was: {err.rstrip().rsplit(chr(10), 1)[-1][:300]}")
        if ended_s > self.plan.ended_s:
            wrong.append(f"gone after {ended_s:.2f} s")
        return wrong


def pause(pid, _):
    os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(pid, signal.SIGCONT)


def in_dev_shm():
    """The files there, less those of Open MPI: none of these jobs uses it, another beside them may."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("vader_segment.")}


def set_clocks(_, folder):
    """An hour forward, and two back, for all processes of the job."""
    for clock in ("+3600", "-3600"):
        (folder / "clock").write_text(clock + "\n")
        time.sleep(0.5)


def plan_for(name, victim, rng, args):
    step = rng.randrange(EDGE, 100)
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
    if name == "killin":  # while it waits in an all_reduce for a rank that is late
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
    if name == "stop":  # both clocks run, and the one that is first tells
        return FaultPlan(
            ["--hang-timeout", "30", "--stall-timeout", "10"], [], kill(signal.SIGSTOP), "RANK_STALLED", 124, 13, 15
        )
    if name == "loop":
        return FaultPlan(limits, [], None, "RANK_STUCK", 124, 13, 15)._replace(options=limits + inject("loop"))
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
    sys.exit(f"there is no fault {name}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True, type=os.path.abspath)
    parser.add_argument("--program", required=True, type=os.path.abspath)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", default="kill,killin,pause,stop,loop,deadlock,throw,segv,flip,desync,clock")
    parser.add_argument("--transport", default="shm,gloo,hierarchy")
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

    return tally.run_all(names, lambda _: args.runs, one)


main()
