#!/usr/bin/env python3
"""Jobs that are started again and again: what their ranks have written, and who may not take part.

restarts.py --lockstep PATH --program PATH [--kills N] [--seed N] [CASE...]; without cases all. PATH of the program is that of restart_probe.
"""

import argparse
import fcntl
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
import check_history  # noqa: E402
from marked import environment, marked  # noqa: E402

MARK = "LOCKSTEP_TEST_RESTARTS"
RANKS = 3
EVERY = 5  # steps from checkpoint to checkpoint
LIMIT_S = 60


def check(good, text):
    print(("ok: " if good else "FAILED: ") + text, flush=True)
    if not good:
        raise SystemExit(1)


def until(condition, what, limit_s=30.0):
    begun = time.monotonic()
    while not (found := condition()):
        if time.monotonic() - begun > limit_s:
            check(False, f"in {limit_s} s: {what}")
        time.sleep(0.005)
    return found


class Job:
    """`lockstep run` of the probe, in a folder of its own."""

    def __init__(self, folder, steps, ranks=RANKS, restarts=0):
        self.folder = pathlib.Path(folder)
        self.mark = f"{os.getpid()}.{self.folder.name}"
        self.ranks = ranks
        words = [ARGUMENTS.lockstep, "run", "-n", str(ranks), "--bind", "none", "--max-restarts", str(restarts)]
        words += ["--restart-pause", "0.01"] if restarts else []
        self.process = subprocess.Popen(
            [*words, "--", ARGUMENTS.program, folder, str(steps), str(EVERY)],
            env={**os.environ, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pids(self, generation):
        """{rank: pid} of a generation's ranks that live."""
        found = marked(MARK, self.mark)
        return {
            int(env["LOCKSTEP_RANK"]): pid
            for pid, env in found.items()
            if env.get("LOCKSTEP_GENERATION") == str(generation)
        }

    def all_there(self, generation):
        return until(
            lambda: (pids := self.pids(generation)) and len(pids) == self.ranks and pids,
            f"generation {generation} has all ranks",
        )

    def saved(self):
        """The number of the newest checkpoint."""
        try:
            return int((self.folder / "checkpoint").read_text(encoding="ascii").split()[0])
        except OSError:
            return 0

    def lines(self):
        return check_history.read(sorted(self.folder.glob("rank.*.jsonl")))

    def end(self):
        """(exit code, stdout, stderr)"""
        try:
            out, err = self.process.communicate(timeout=LIMIT_S)
        finally:
            for pid in marked(MARK, self.mark):
                os.kill(pid, signal.SIGKILL)
        return self.process.returncode, out, err


def result(out):
    return re.findall(r"^\[0\] (params .*)$", out, re.M)


# A rank is killed at a random moment, again and again, and the job comes to the same end.


def random_kills(folder):
    kills = ARGUMENTS.kills
    seed = ARGUMENTS.seed if ARGUMENTS.seed is not None else random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    (folder / "alone").mkdir()
    (folder / "killed").mkdir()
    steps = 80 * (kills + 1)  # more than it comes to before the last kill
    code, out, err = Job(str(folder / "alone"), steps).end()
    expected = result(out)
    check(code == 0 and len(expected) == 1, f"undisturbed: {expected} {err[-300:]}")
    job = Job(str(folder / "killed"), steps, restarts=kills + 10)
    victims = []
    for generation in range(kills):
        before = job.saved()
        pids = job.all_there(generation)
        until(
            lambda before=before: job.saved() > before, "a newer checkpoint"
        )  # else it would be told that it does not get on
        time.sleep(
            rng.uniform(0, 0.05)
        )  # the random moment: a step takes 4 ms, and a checkpoint is written every fifth
        victims.append(rng.randrange(RANKS))
        os.kill(pids[victims[-1]], signal.SIGKILL)
    code, out, err = job.end()
    check(
        code == 0 and result(out) == expected,
        f"seed {seed}, ranks {victims} killed: code {code}, {result(out)} {err[-600:] if code else ''}",
    )
    told = re.findall(
        r"^lockstep: RANK_DIED of rank (\d+) on \S+: killed by SIGKILL.*; restart (\d+) of \d+ in ", err, re.M
    )
    check(
        told == [(str(rank), str(number)) for number, rank in enumerate(victims, start=1)],
        f"{len(told)} lines name who was killed",
    )
    check("FATAL" not in err, "no line says that the run has failed")
    lines = job.lines()
    wrong = check_history.check(lines, EVERY)
    generations = sorted({line["gen"] for line in lines})
    check(
        not wrong and generations == list(range(kills + 1)),
        f"{len(lines)} lines of {len(generations)} generations: {wrong[:3] or 'H1 to H5 hold'}",
    )


# What is left of a generation has no part in the next one.


def start_as(variables, page, *words):
    """The probe, with the variables of a rank, and the memory in which that has the job's key."""
    number = int(variables["LOCKSTEP_PAGE"])
    spare = fcntl.fcntl(page, fcntl.F_DUPFD, 200)  # not in the way of what subprocess opens

    def give_page():
        os.dup2(spare, number)

    process = subprocess.Popen(
        [ARGUMENTS.program, *words],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=give_page,
        close_fds=False,
    )
    os.close(spare)
    return process


def ends_with(process, code, text):
    _, err = process.communicate(timeout=LIMIT_S)
    check(process.returncode == code and text in err, f"code {process.returncode}: {err.strip()}")


def stale_ranks_are_rejected(folder):
    words = [str(folder), "1000000", str(EVERY)]
    job = Job(words[0], words[1], ranks=2, restarts=5)
    old = environment(job.all_there(0)[1])
    page = os.open(f"/proc/{job.pids(0)[1]}/fd/{old['LOCKSTEP_PAGE']}", os.O_RDWR)
    # One that joins as rank 1, and is stopped before it does anything.
    stale = start_as({**old, MARK: "stale"}, page, *words, "hold")
    until(lambda: state_of(stale.pid) == "T", "it has joined and is stopped")
    until(lambda: job.saved() > 0, "a checkpoint")
    os.kill(job.pids(0)[1], signal.SIGKILL)
    new = environment(job.all_there(1)[1])
    check(
        old["LOCKSTEP_JOB"] == new["LOCKSTEP_JOB"] and old["LOCKSTEP_STORE"] != new["LOCKSTEP_STORE"],
        "the same job, another store",
    )
    os.kill(stale.pid, signal.SIGCONT)
    ends_with(stale, 69, "COORDINATOR_LOST")
    # And those that know where the new store is.
    ends_with(start_as({**old, MARK: "stale", "LOCKSTEP_STORE": new["LOCKSTEP_STORE"]}, page, *words), 76, "STALE_GEN")
    ends_with(start_as({**new, MARK: "stale"}, page, *words), 76, "AUTH_FAILED")
    before = job.saved()
    until(lambda: job.saved() > before, "the job gets on")
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.end()
    check(
        code == 130 and "rank 1 of another start of this job, 0 instead of 1, was turned away" in err,
        f"code {code}; the launcher tells of it",
    )
    lines = job.lines()
    wrong = check_history.check(lines, EVERY)
    check(
        not wrong and {line["gen"] for line in lines} == {0, 1}, f"{len(lines)} lines: {wrong[:3] or 'H1 to H5 hold'}"
    )


def state_of(pid):
    text = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    return text[text.rindex(")") + 2]


CASES = {case.__name__: case for case in (random_kills, stale_ranks_are_rejected)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("cases", nargs="*")
    global ARGUMENTS
    ARGUMENTS = parser.parse_args()
    for name in ARGUMENTS.cases or CASES:
        print(f"-- {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            CASES[name](pathlib.Path(folder))


main()
