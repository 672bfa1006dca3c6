#!/usr/bin/env python3
"""SIGKILL at random moments of saves, again and again, of two ranks that do nothing but save (save_probe); each run goes on in the folder that the one before it left.

usage: save_kills.py --lockstep PATH --program PATH [--runs N] [--ranks N] [--folder DIR] [--seed N]
A kill takes one rank or all, or rank 0 and a moment later the others. Then: the job ends within 10 s with a FATAL line that names a rank that was killed; the next run finds a newest checkpoint that is whole to the last byte,
not older than the last that was told to be durable, of the two newest both, and its first save leaves nothing of the dead. Prints a line for each run that is not so, and a summary; exit code 1 when there was one.
"""

import argparse
import contextlib
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time

from marked import marked

LIMIT_S = 10.0
START_S = 60.0
MARK = "LOCKSTEP_TEST_SAVE_KILLS"


def read_until(job, text, seconds):
    """What the job says until `text` and the rest of that line are in it."""
    said, deadline = "", time.monotonic() + seconds
    while text not in said or not said.endswith("\n"):
        ready, _, _ = select.select([job.stdout], [], [], max(0, deadline - time.monotonic()))
        read = os.read(job.stdout.fileno(), 65536).decode() if ready else ""
        if not read:
            break
        said += read
    return said


def kill(pids, rng):
    """The ranks that were killed."""
    how = rng.choice(["one", "one", "all", "staggered"])
    ranks = [rng.choice(sorted(pids))] if how == "one" else sorted(pids)
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):  # its launcher was quicker
            os.kill(pids[rank], signal.SIGKILL)
        if how == "staggered":
            time.sleep(rng.uniform(0, 0.01))
    return ranks


def one_run(args, number, rng, told, longest):
    """What was wrong, and the newest step that is durable as far as anybody was told."""
    mark = f"{os.getpid()}.{number}"
    command = [args.lockstep, "run", "-n", str(args.ranks), "--bind", "none", "--", args.program, args.folder]
    job = subprocess.Popen(command, env={**os.environ, MARK: mark}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        said = read_until(job, "found ", START_S)
        found = re.search(r"found (\d+) whole (\d+)", said)
        if not found:
            job.kill()
            return f"nothing was found: {said!r} {job.stderr.read().decode()[-2000:]}", told, 0
        wrong = []
        if int(found[1]) < told:
            wrong.append(f"the newest is step {found[1]}, and step {told} was durable")
        if int(found[2]) < min(2, told):
            wrong.append(f"{found[2]} are whole")
        pids = {int(env["LOCKSTEP_RANK"]): pid for pid, env in marked(MARK, mark).items() if "LOCKSTEP_RANK" in env}
        time.sleep(rng.uniform(0, longest))
        begin = time.monotonic()
        killed = kill(pids, rng)
        out, err = job.communicate(timeout=4 * LIMIT_S)
        took, said, err = time.monotonic() - begin, said + out.decode(), err.decode()
        fatal = re.findall(r"^FATAL cause=(\w+) rank=(\d+)", err, re.MULTILINE)
        if took > LIMIT_S or len(fatal) != 1 or fatal[0][0] != "RANK_DIED" or int(fatal[0][1]) not in killed:
            wrong.append(f"ranks {killed} were killed, {took:.1f} s later: {err[-2000:]}")
        saved = [int(step) for step in re.findall(r"saved (\d+)", said)]
        return "; ".join(wrong), max([told, int(found[1]), *saved]), len(saved)
    except subprocess.TimeoutExpired:
        return f"the launcher did not end in {4 * LIMIT_S:.0f} s", told, 0
    finally:
        for pid in marked(MARK, mark):
            os.kill(pid, signal.SIGKILL)
        job.wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--longest", type=float, default=0.15, help="seconds from the first save to the kill, at most")
    parser.add_argument("--folder")
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as made:
        args.folder = args.folder or made
        told, failed, num_saved, longest = 0, 0, 0, args.longest
        for number in range(args.runs):
            wrong, told, saved = one_run(args, number, rng, told, longest)
            num_saved += saved
            longest = (
                min(2.0, longest * 1.5) if saved == 0 else max(args.longest, longest / 1.5)
            )  # a busy machine saves later
            failed += bool(wrong)
            if wrong or (number + 1) % 100 == 0:
                print(f"run {number}: {wrong or 'as it should be'}; step {told}", flush=True)
    print(f"{args.runs - failed} of {args.runs} kills as they should be, {num_saved} checkpoints were durable")
    sys.exit(1 if failed or num_saved < args.runs // 4 else 0)


main()
