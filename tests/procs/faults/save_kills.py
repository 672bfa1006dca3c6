#!/usr/bin/env python3
"""Kills ranks that only save (save_probe) at random times, many times; each run uses the folder of the one before it.

Usage: save_kills.py --lockstep PATH --program PATH_OF_SAVE_PROBE [--runs N] [--ranks N] [--folder DIR] [--seed N]
A kill ends one rank, all ranks, or the ranks shortly after one another. Then the job must end within 10 s with a FATAL
line that names a killed rank. The next run must find that the newest checkpoint is complete to the last byte and not
older than the last one that was reported durable, and that the two newest are complete; its first save must remove
what killed processes left. Prints a line for each failed run, and a summary. The exit code is 1 if a run failed.
"""

import argparse
import contextlib
import os
import pathlib
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
from tagged_processes import find_ranks, kill_tagged  # noqa: E402

LIMIT_S = 10.0
START_S = 60.0
MARK = "LOCKSTEP_TEST_SAVE_KILLS"


def read_until(job, text, seconds):
    """Returns the output of the job until a line contains `text`."""
    output, deadline = "", time.monotonic() + seconds
    while text not in output or not output.endswith("\n"):
        ready, _, _ = select.select([job.stdout], [], [], max(0, deadline - time.monotonic()))
        read = os.read(job.stdout.fileno(), 65536).decode() if ready else ""
        if not read:
            break
        output += read
    return output


def kill(pids, rng):
    """Kills some ranks, and returns them."""
    how = rng.choice(["one", "one", "all", "staggered"])
    ranks = [rng.choice(sorted(pids))] if how == "one" else sorted(pids)
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):  # the launcher may have ended it first
            os.kill(pids[rank], signal.SIGKILL)
        if how == "staggered":
            time.sleep(rng.uniform(0, 0.01))
    return ranks


def one_run(args, number, rng, durable, longest):
    """Returns (errors, the newest step that was reported durable, the number of saves of this run)."""
    mark = f"{os.getpid()}.{number}"
    command = [args.lockstep, "run", "-n", str(args.ranks), "--bind", "none", "--", args.program, args.folder]
    job = subprocess.Popen(command, env={**os.environ, MARK: mark}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output = read_until(job, "found ", START_S)
        found = re.search(r"found (\d+) complete (\d+)", output)
        if not found:
            job.kill()
            return f"no checkpoint was found: {output!r} {job.stderr.read().decode()[-2000:]}", durable, 0
        wrong = []
        if int(found[1]) < durable:
            wrong.append(f"the newest is step {found[1]}, but step {durable} was durable")
        if int(found[2]) < min(2, durable):
            wrong.append(f"{found[2]} checkpoints are complete")
        pids = find_ranks(MARK, mark)
        time.sleep(rng.uniform(0, longest))
        begin = time.monotonic()
        killed = kill(pids, rng)
        out, err = job.communicate(timeout=4 * LIMIT_S)
        took, output, err = time.monotonic() - begin, output + out.decode(), err.decode()
        fatal = re.findall(r"^FATAL cause=(\w+) rank=(\d+)", err, re.MULTILINE)
        if took > LIMIT_S or len(fatal) != 1 or fatal[0][0] != "RANK_DIED" or int(fatal[0][1]) not in killed:
            wrong.append(f"ranks {killed} were killed, {took:.1f} s later: {err[-2000:]}")
        saved = [int(step) for step in re.findall(r"saved (\d+)", output)]
        return "; ".join(wrong), max([durable, int(found[1]), *saved]), len(saved)
    except subprocess.TimeoutExpired:
        return f"the launcher did not end in {4 * LIMIT_S:.0f} s", durable, 0
    finally:
        kill_tagged(MARK, mark)
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
        durable, failed, num_saved, longest = 0, 0, 0, args.longest
        for number in range(args.runs):
            wrong, durable, saved = one_run(args, number, rng, durable, longest)
            num_saved += saved
            # A busy machine saves later.
            longest = min(2.0, longest * 1.5) if saved == 0 else max(args.longest, longest / 1.5)
            failed += bool(wrong)
            if wrong or (number + 1) % 100 == 0:
                print(f"run {number}: {wrong or 'passed'}; step {durable}", flush=True)
    print(f"{args.runs - failed} of {args.runs} runs passed, {num_saved} checkpoints were durable")
    sys.exit(1 if failed or num_saved < args.runs // 4 else 0)


main()
