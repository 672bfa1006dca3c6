#!/usr/bin/env python3
"""Kills or stops trainings at random times, resumes them, and compares the result with an uninterrupted training.

Usage: kill_and_resume.py kill|term|stop|restart|loop --lockstep PATH --program training_resumable [--runs N]
           [--model mlp|mnist|gpt] [--data PATH] [--samples N] [--epochs N] [--seed N]

kill:    two ranks, one of which receives SIGKILL in a random step; resumed with resume=auto. The final weights are
         bit-equal.
term:    two ranks, one of which receives SIGTERM at a random time: exit code 75, and bit-equal weights after
         resume=auto.
stop:    2, then 3, then 1 ranks (--worlds); each job but the last receives SIGTERM at a random time: exit code 75. Each
         epoch has every sample exactly once, and the mean loss of the last epoch differs by at most 1 %.
restart: one job with --max-restarts, whose ranks receive SIGKILL in --kills random steps. The final weights are
         bit-equal.

loop:    the program is 05_custom_loop, a handwritten loop; one of its two ranks receives SIGKILL at a random time,
         three times. All files of the last checkpoint are bit-equal. --data is a directory with MNIST; if it does not
         exist, the data are generated.

Checks the histories of the ranks of every run (resume_history.py). Prints a line per run; the exit code is 1 if a run
was wrong.
"""

import argparse
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import resume_history

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import fake_mnist  # noqa: E402

LIMIT_S = 300


class Job:
    """A training that runs under lockstep run."""

    def __init__(self, args, root, name, world, extra, options=()):
        self.history = os.path.join(root, name + ".history")
        os.makedirs(self.history, exist_ok=True)
        words = [
            f"model={args.model}",
            f"folder={root}",
            f"name={name}",
            f"history={self.history}",
            f"epochs={args.epochs}",
            f"samples={args.samples}",
            f"batch={args.batch}",
        ]
        if args.data:
            words.append(f"data={args.data}")
        if args.kind == "stop":
            words.append("plain=1")
        command = [
            args.lockstep,
            "run",
            "-n",
            str(world),
            "--bind",
            "none",
            *options,
            "--",
            args.program,
            *words,
            *extra,
        ]
        self.process = subprocess.Popen(
            command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def wait(self):
        """Waits for the job and returns its exit code, the match of its last line, and its stderr."""
        try:
            out, err = self.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            out, err = self.process.communicate()
            raise SystemExit(f"a job did not exit within {LIMIT_S} s\n{out}{err}") from None
        found = re.search(r"end=(\d+) steps=(\d+) epochs=(\d+) loss=(\S+) hash=(\w+)", out)
        return self.process.returncode, found, err

    def lines(self, rank=0):
        """Returns the records of a rank: its starts and its steps."""
        try:
            with open(os.path.join(self.history, f"rank.{rank}.jsonl"), encoding="utf8") as file:
                lines = [json.loads(line) for line in file if line.endswith("\n")]
        except OSError:
            lines = []
        return [line for line in lines if "pid" in line], [line for line in lines if "step" in line]

    def wait_for_steps(self, count):
        """Waits until rank 0 has recorded `count` steps."""
        begin = time.monotonic()
        while len(self.lines()[1]) < count and self.process.poll() is None and time.monotonic() < begin + LIMIT_S:
            time.sleep(0.005)


def run_reference(args, root):
    """Runs the uninterrupted training and returns the match of its last line."""
    job = Job(args, root, "reference", 2, [])
    code, found, err = job.wait()
    if code != 0 or not found:
        raise SystemExit(f"the uninterrupted training exited with {code}\n{err}")
    return found


def run_killed(args, root, number, rng, ref):
    name, steps = f"killed-{number}", int(ref[2])
    step, rank = rng.randint(2, steps), rng.randrange(2)
    job = Job(args, root, name, 2, [f"kill={rank}@{step}", f"save_every={args.save_every}"])
    code, found, err = job.wait()
    wrong = []
    if code != 128 + signal.SIGKILL:
        wrong.append(f"exit code {code} after SIGKILL: {err[-300:]}")
    code, found, err = Job(args, root, name, 2, ["resume=auto", f"save_every={args.save_every}"]).wait()
    if code != 0 or not found or found[5] != ref[5]:
        wrong.append(f"exit code {code}, {found and found[0]} instead of {ref[0]}: {err[-300:]}")
    # The save before the kill may not have been durable.
    wrong += resume_history.check(job.history, args.samples, max_lost=2 * args.save_every)
    return f"rank {rank} killed in step {step} of {steps}", wrong


def run_terminated(args, root, number, rng, ref):
    name, steps, rank, wrong = f"terminated-{number}", int(ref[2]), rng.randrange(2), []
    job = Job(args, root, name, 2, ["slow_ms=10", f"save_every={args.save_every}"])
    job.wait_for_steps(rng.randint(1, steps - 2))
    os.kill(job.lines(rank)[0][-1]["pid"], signal.SIGTERM)
    code, found, err = job.wait()
    at = found[2] if found else "?"
    if code != 75:
        wrong.append(f"exit code {code} after SIGTERM: {err[-300:]}")
    code, found, err = Job(args, root, name, 2, ["resume=auto", f"save_every={args.save_every}"]).wait()
    if code != 0 or not found or found[5] != ref[5]:
        wrong.append(f"exit code {code}, {found and found[0]} instead of {ref[0]}: {err[-300:]}")
    wrong += resume_history.check(job.history, args.samples, max_lost=0, epochs=args.epochs)
    return f"rank {rank} received SIGTERM, all ranks stopped after step {at} of {steps}", wrong


def run_restarted(args, root, number, rng, ref):
    steps = int(ref[2])
    kills = sorted(rng.sample(range(2, steps + 1), min(args.kills, steps - 1)))
    name = f"restarted-{number}"
    words = ",".join(f"{rng.randrange(2)}@{step}" for step in kills)
    job = Job(
        args, root, name, 2, [f"kill={words}", f"save_every={args.save_every}"], ["--max-restarts", str(len(kills))]
    )
    code, found, err = job.wait()
    wrong = []
    if code != 0 or not found or found[5] != ref[5]:
        wrong.append(f"exit code {code}, {found and found[0]} instead of {ref[0]}: {err[-300:]}")
    wrong += resume_history.check(job.history, args.samples, max_lost=2 * args.save_every)
    kills_done = sum(name.startswith("killed.") for name in os.listdir(job.history))
    if kills_done != len(kills):
        wrong.append(f"{kills_done} kills instead of {len(kills)}")
    return f"{kills_done} kills", wrong


def run_stopped(args, root, number, rng, ref):
    name, wrong, summary = f"stopped-{number}", [], []
    steps = int(ref[2])
    before = 0
    for world in args.worlds[:-1]:
        job = Job(args, root, name, world, ["resume=auto", "slow_ms=5", "save_every=0"])
        job.wait_for_steps(before + rng.randint(1, max(1, steps // len(args.worlds))))
        job.process.send_signal(signal.SIGTERM)
        code, found, err = job.wait()
        if code != 75:
            wrong.append(f"{world} ranks: exit code {code}: {err[-300:]}")
        before = len(job.lines()[1])
        summary.append(f"{world} ranks to step {found[2] if found else '?'}")
    job = Job(args, root, name, args.worlds[-1], ["resume=auto", "save_every=0"])
    code, found, err = job.wait()
    loss, expected = (float(found[4]), float(ref[4])) if found else (float("nan"), float("nan"))
    if code != 0 or not abs(loss - expected) <= 0.01 * expected:
        wrong.append(f"exit code {code}, loss {loss} instead of {expected}: {err[-300:]}")
    wrong += resume_history.check(job.history, args.samples, max_lost=0, epochs=args.epochs)
    return ", ".join(summary) + f", loss {loss:.6g}, expected {expected:.6g}", wrong


def loop_command(args, folder):
    words = ["--data", args.data, "--folder", folder, "--epochs", "1", "--save-every", str(args.save_every)]
    return [args.lockstep, "run", "-n", "2", "--bind", "none", "--", args.program, *words, "--batch-size", "64"]


def loop_ranks(args, folder):
    """Returns the process ids of the ranks that write into the folder."""
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", encoding="utf8", errors="replace") as file:
                words = file.read().split("\0")
        except OSError:
            continue
        if words[0] == args.program and folder in words:
            pids.append(int(pid))
    return pids


def newest_checkpoint(folder):
    """Returns the name and the files of the newest checkpoint, or None and no files."""
    checkpoints = os.path.join(folder, "checkpoints")
    names = [name for name in os.listdir(checkpoints) if "-step-" in name] if os.path.isdir(checkpoints) else []
    if not names:
        return None, {}
    path, files = os.path.join(checkpoints, max(names)), {}
    for name in os.listdir(path):
        if name != "MANIFEST.json":  # it contains no state
            with open(os.path.join(path, name), "rb") as file:
                files[name] = file.read()
    return max(names).split("-", 1)[1], files


def run_loop(args, rng, folder):
    """Kills the loop three times, each time after a new checkpoint, resumes it, and returns its last checkpoint."""
    kills = []
    for _ in range(3):
        before = newest_checkpoint(folder)[0]
        job = subprocess.Popen(
            loop_command(args, folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        while newest_checkpoint(folder)[0] == before and job.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.03)
        kills.append(newest_checkpoint(folder)[0])
        ranks = loop_ranks(args, folder)
        if ranks:
            os.kill(rng.choice(ranks), signal.SIGKILL)
        job.wait(timeout=LIMIT_S)
    finished = subprocess.run(loop_command(args, folder), capture_output=True, text=True, timeout=LIMIT_S)
    wrong = [] if finished.returncode == 0 else [f"exit code {finished.returncode}: {finished.stderr[-500:]}"]
    if kills[0] == newest_checkpoint(folder)[0]:
        wrong.append("the first kill came after the last checkpoint, so nothing was resumed")
    return f"killed at {', '.join(map(str, kills))}", wrong


def check_loop(args, root, rng):
    """Runs the loop without an interruption and then killed; returns the number of runs with a wrong result."""
    if not os.path.isdir(args.data):
        args.data = os.path.join(root, "data")
        os.mkdir(args.data)
        fake_mnist.write(pathlib.Path(args.data), 10000)
    reference = os.path.join(root, "reference")
    subprocess.run(loop_command(args, reference), check=True, capture_output=True, timeout=LIMIT_S)
    expected, failed = newest_checkpoint(reference), 0
    for number in range(args.runs):
        folder = os.path.join(root, f"killed-{number}")
        what, wrong = run_loop(args, rng, folder)
        got = newest_checkpoint(folder)
        different = sorted(name for name in expected[1] if got[1].get(name) != expected[1][name])
        if got[0] != expected[0] or got[1].keys() != expected[1].keys() or different:
            wrong.append(f"the last checkpoint is {got[0]} instead of {expected[0]}; different files: {different}")
        failed += bool(wrong)
        print(f"run {number}: {what}{': ' + '; '.join(wrong) if wrong else ''}", flush=True)
    print(f"{args.runs - failed} of {args.runs} runs were correct", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["kill", "term", "stop", "restart", "loop"])
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--worlds", type=lambda text: [int(word) for word in text.split(",")], default=[2, 3, 1])
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--data", default="")
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    root = tempfile.mkdtemp(prefix="lockstep-kill-and-resume-")
    try:
        if args.kind == "loop":
            return 1 if check_loop(args, root, rng) else 0
        ref = run_reference(args, root)
        print(f"seed {seed}; uninterrupted: {ref[0]}", flush=True)
        kinds = {
            "kill": run_killed,
            "term": run_terminated,
            "stop": run_stopped,
            "restart": run_restarted,
        }
        run = kinds[args.kind]
        failed = 0
        for number in range(args.runs):
            what, wrong = run(args, root, number, rng, ref)
            failed += bool(wrong)
            print(f"run {number}: {what}{': ' + '; '.join(wrong) if wrong else ''}", flush=True)
        print(f"{args.runs - failed} of {args.runs} runs were correct", flush=True)
        return 1 if failed else 0
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
