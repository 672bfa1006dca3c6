#!/usr/bin/env python3
"""Tests jobs that are restarted many times: the histories of their ranks, and the rejection of stale ranks.

Usage: restarts.py --lockstep PATH --program PATH_OF_RESTART_PROBE [--kills N] [--seed N] [CASE...]. The default is all
cases.
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

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import check_history  # noqa: E402
from checks import check, wait_until  # noqa: E402
from tagged_processes import environment, find_tagged, kill_tagged  # noqa: E402

MARK = "LOCKSTEP_TEST_RESTARTS"
RANKS = 3
STEPS_PER_CHECKPOINT = 5
LIMIT_S = 240


class Job:
    """A `lockstep run` of the probe in a folder of its own."""

    def __init__(self, folder, steps, ranks=RANKS, restarts=0):
        self.folder = pathlib.Path(folder)
        self.mark = f"{os.getpid()}.{self.folder.name}"
        self.ranks = ranks
        words = [ARGUMENTS.lockstep, "run", "-n", str(ranks), "--bind", "none", "--max-restarts", str(restarts)]
        words += ["--restart-pause", "0.01"] if restarts else []
        self.process = subprocess.Popen(
            [*words, "--", ARGUMENTS.program, folder, str(steps), str(STEPS_PER_CHECKPOINT)],
            env={**os.environ, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pids(self, generation):
        """Returns {rank: pid} of the live ranks of a generation."""
        found = find_tagged(MARK, self.mark)
        return {
            int(env["LOCKSTEP_RANK"]): pid
            for pid, env in found.items()
            if env.get("LOCKSTEP_GENERATION") == str(generation)
        }

    def wait_for_ranks(self, generation):
        """Blocks until all ranks of a generation run. Returns {rank: pid}."""
        return wait_until(
            lambda: (pids := self.pids(generation)) and len(pids) == self.ranks and pids,
            f"generation {generation} does not have all ranks",
        )

    def saved(self):
        """Returns the number of the newest checkpoint."""
        try:
            return int((self.folder / "checkpoint").read_text(encoding="ascii").split()[0])
        except OSError:
            return 0

    def lines(self):
        return check_history.read(sorted(self.folder.glob("rank.*.jsonl")))

    def end(self):
        """Blocks until the job ends. Returns (exit code, stdout, stderr)."""
        try:
            out, err = self.process.communicate(timeout=LIMIT_S)
        finally:
            kill_tagged(MARK, self.mark)
        return self.process.returncode, out, err


def result(out):
    """Returns the last line of rank 0, in a list."""
    return re.findall(r"^\[0\] (params .*)$", out, re.M)


def random_kills(folder):
    """Kills a rank at a random time in each generation; the result must equal that of an undisturbed run."""
    kills = ARGUMENTS.kills
    seed = ARGUMENTS.seed if ARGUMENTS.seed is not None else random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    (folder / "alone").mkdir()
    (folder / "killed").mkdir()
    steps = 80 * (kills + 1)  # more than it runs before the last kill
    code, out, err = Job(str(folder / "alone"), steps).end()
    expected = result(out)
    check(code == 0 and len(expected) == 1, f"undisturbed: {expected} {err[-300:]}")
    job = Job(str(folder / "killed"), steps, restarts=kills + 10)
    victims = []
    for generation in range(kills):
        pids = job.wait_for_ranks(generation)
        before = job.saved()  # not earlier: a rank of the previous generation may have been saving
        # Without a newer checkpoint the job would end with NO_PROGRESS.
        wait_until(lambda before=before: job.saved() > before, "there is no newer checkpoint")
        # A step takes 4 ms, and every fifth writes a checkpoint.
        time.sleep(rng.uniform(0, 0.05))
        victims.append(rng.randrange(RANKS))
        os.kill(pids[victims[-1]], signal.SIGKILL)
    code, out, err = job.end()
    check(
        code == 0 and result(out) == expected,
        f"seed {seed}, ranks {victims} killed: code {code}, {result(out)} {err[-600:] if code else ''}",
    )
    reports = re.findall(
        r"^lockstep: RANK_DIED of rank (\d+) on \S+: killed by SIGKILL.*; restart (\d+) of \d+ in ", err, re.M
    )
    check(
        reports == [(str(rank), str(number)) for number, rank in enumerate(victims, start=1)],
        f"{len(reports)} lines name the killed rank",
    )
    check("FATAL" not in err, "there is no FATAL line")
    lines = job.lines()
    wrong = check_history.check(lines, STEPS_PER_CHECKPOINT)
    generations = sorted({line["gen"] for line in lines})
    check(
        not wrong and generations == list(range(kills + 1)),
        f"{len(lines)} lines of {len(generations)} generations: {wrong[:3] or 'H1 to H5 hold'}",
    )


def start_as(variables, page, *words):
    """Starts the probe with the variables of a rank, and with its page, which contains the key of the job."""
    number = int(variables["LOCKSTEP_PAGE"])
    spare = fcntl.fcntl(page, fcntl.F_DUPFD, 200)  # above the descriptors that subprocess opens

    def pass_page():
        os.dup2(spare, number)

    process = subprocess.Popen(
        [ARGUMENTS.program, *words],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=pass_page,
        close_fds=False,
    )
    os.close(spare)
    return process


def expect_end(process, code, text):
    """Blocks until a process exits, with `code` and with `text` in its stderr."""
    _, err = process.communicate(timeout=LIMIT_S)
    check(process.returncode == code and text in err, f"code {process.returncode}: {err.strip()}")


def stale_ranks_are_rejected(folder):
    """Processes of an earlier generation must not join a later one."""
    words = [str(folder), "1000000", str(STEPS_PER_CHECKPOINT)]
    job = Job(words[0], words[1], ranks=2, restarts=5)
    old = environment(job.wait_for_ranks(0)[1])
    page = os.open(f"/proc/{job.pids(0)[1]}/fd/{old['LOCKSTEP_PAGE']}", os.O_RDWR)
    # A process that joins as rank 1, and stops before it does anything.
    stale = start_as({**old, MARK: "stale"}, page, *words, "hold")
    wait_until(lambda: state_of(stale.pid) == "T", "the stale rank has not joined and stopped")
    wait_until(lambda: job.saved() > 0, "there is no checkpoint")
    os.kill(job.pids(0)[1], signal.SIGKILL)
    new = environment(job.wait_for_ranks(1)[1])
    check(
        old["LOCKSTEP_JOB"] == new["LOCKSTEP_JOB"] and old["LOCKSTEP_STORE"] != new["LOCKSTEP_STORE"],
        "the job is the same, and its store is a new one",
    )
    os.kill(stale.pid, signal.SIGCONT)
    expect_end(stale, 69, "COORDINATOR_LOST")
    # Processes that have the address of the new store.
    expect_end(start_as({**old, MARK: "stale", "LOCKSTEP_STORE": new["LOCKSTEP_STORE"]}, page, *words), 76, "STALE_GEN")
    expect_end(start_as({**new, MARK: "stale"}, page, *words), 76, "AUTH_FAILED")
    before = job.saved()
    wait_until(lambda: job.saved() > before, "the job makes no progress")
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.end()
    check(
        code == 130 and "rank 1 of generation 0 instead of generation 1 of this job was rejected" in err,
        f"code {code}; the launcher reports the rejection",
    )
    lines = job.lines()
    wrong = check_history.check(lines, STEPS_PER_CHECKPOINT)
    check(
        not wrong and {line["gen"] for line in lines} == {0, 1}, f"{len(lines)} lines: {wrong[:3] or 'H1 to H5 hold'}"
    )


def state_of(pid):
    """Returns the state of a process, as in /proc/PID/stat."""
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
