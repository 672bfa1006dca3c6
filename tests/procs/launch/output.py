#!/usr/bin/env python3
"""Tests that the output of ranks to files and pipes is complete, and that ranks wait for a reader that is slow.

Usage: output.py --lockstep PATH --program PATH_OF_TRAIN_PROBE [--megabytes N] [--ssh] [CASE...]
N is the output of each of four ranks. With --ssh, the ranks run on two hosts, which are network namespaces.
The exit code is 77 if the machine lacks what the script requires.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import host_cluster  # noqa: E402
import ssh_cluster  # noqa: E402
from checks import check, wait_until  # noqa: E402

RANKS = 4
PRINT_BYTES = 100
PRINTS_PER_STEP = 250
LINE = re.compile(r"(?:\[(?:\w+:)?(\d)\] )?rank (\d) line (\d{8}) (0{75})\n")
MEMORY_LIMIT = 64 << 20
TIMEOUT = 250
os.environ["LOCKSTEP_LOG"] = "quiet"


def job(args, steps, *options, lines=PRINTS_PER_STEP):
    where = ["-H", f"h1:{RANKS // 2},h2:{RANKS // 2}"] if args.ssh else ["-n", str(RANKS)]
    return [args.lockstep, "run", *where, *options, "--", args.program, "print", str(steps), str(lines)]


def steps_for(args):
    return args.megabytes * 1_000_000 // (PRINT_BYTES * PRINTS_PER_STEP)


class Counter:
    """Checks that each rank's lines are whole and in order."""

    def __init__(self):
        self.next = {}

    def read(self, file):
        for line in file:
            found = LINE.fullmatch(line)
            if not found or found[1] not in (None, found[2]) or int(found[3]) != self.next.get(found[2], 0):
                check(False, f"a line is cut, lost or out of order: {line[:200]!r}")
            rank, number = found[2], int(found[3])
            self.next[rank] = number + 1

    def check_all(self, lines):
        check(self.next == {str(rank): lines for rank in range(RANKS)}, f"each rank's {lines} lines arrived")


class PeakMemory:
    """Samples the resident memory of a launcher and of its agents: the programs `lockstep` among its descendants."""

    def __init__(self, pid):
        self.peak, self.stop = {}, threading.Event()
        self.thread = threading.Thread(target=self.run, args=(pid,))
        self.thread.start()

    def run(self, pid):
        while not self.stop.wait(0.05):
            for one in processes_below(pid):
                with contextlib.suppress(OSError, IndexError, TypeError):  # it has ended
                    status = pathlib.Path(f"/proc/{one}/status").read_text()
                    if status.split()[1] in ("lockstep", "exe"):  # the local agent runs /proc/self/exe
                        self.peak[one] = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10

    def check(self):
        self.stop.set()
        self.thread.join()
        check(len(self.peak) > 1, "the launcher and its agents were found")
        worst = max(self.peak.values())
        check(worst <= MEMORY_LIMIT, f"at most {worst >> 20} MiB in a launcher or agent")


def processes_below(pid):
    """Returns `pid` and its descendants. Over ssh, the agents are descendants of another process: sshd."""
    parents = {}
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    below = {pid}
    while more := {one for one, parent in parents.items() if parent in below} - below:
        below |= more
    return below


def to_file(args, folder):
    steps = steps_for(args)
    with open(f"{folder}/out", "w+") as out:
        process = subprocess.Popen(job(args, steps), stdout=out, stderr=subprocess.PIPE, text=True)
        memory = PeakMemory(os.getpid())
        _, err = process.communicate(timeout=TIMEOUT)
        memory.check()
        check(process.returncode == 0 and err == "", f"exit code {process.returncode}: {err}")
        out.seek(0)
        counter = Counter()
        counter.read(out)
        counter.check_all(steps * PRINTS_PER_STEP)


def to_slow_pipe(args, folder):
    """The reader sleeps, and then reads in small pieces."""
    steps = steps_for(args)
    process = subprocess.Popen(job(args, steps), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    memory = PeakMemory(os.getpid())
    time.sleep(4)
    counter = Counter()
    counter.read(process.stdout)
    err = process.stderr.read()
    check(process.wait(TIMEOUT) == 0, f"exit code {process.returncode}: {err}")
    memory.check()
    counter.check_all(steps * PRINTS_PER_STEP)


def to_directory(args, folder):
    steps = steps_for(args)
    process = subprocess.Popen(
        job(args, steps, "--output", f"{folder}/logs", "--quiet-ranks"), stdout=subprocess.DEVNULL
    )
    memory = PeakMemory(os.getpid())
    check(process.wait(TIMEOUT) == 0, f"exit code {process.returncode}")
    memory.check()
    counter = Counter()
    for rank in range(RANKS):
        with open(f"{folder}/logs/rank.{rank}.out") as out:
            counter.read(out)
    counter.check_all(steps * PRINTS_PER_STEP)


def unread(args, folder):
    """Nobody reads for longer than the limit for hanging ranks. status says why they wait."""
    hang_s, steps = 6, 400
    process = subprocess.Popen(
        job(args, steps, "--hang-timeout", str(hang_s)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    def blocked():
        out = subprocess.run([args.lockstep, "status", "--json"], capture_output=True, text=True, timeout=20).stdout
        return [rank["rank"] for rank in map(json.loads, out.splitlines()) if rank.get("output_blocked")]

    wait_until(blocked, "no rank waits for its output to be read", 60)
    text = subprocess.run([args.lockstep, "status"], capture_output=True, text=True, timeout=20).stdout
    check("waits for its output to be read" in text, "status says that a rank waits for its output to be read")
    time.sleep(3 * hang_s)
    check(process.poll() is None, f"the job is not judged to hang after {3 * hang_s} s")
    counter = Counter()
    counter.read(process.stdout)
    err = process.stderr.read()
    check(process.wait(TIMEOUT) == 0 and err == "", f"exit code {process.returncode}: {err}")
    counter.check_all(steps * PRINTS_PER_STEP)


def stop_unread(args, folder):
    """Ctrl-C ends a job whose output nobody reads, and ranks can leave in good order."""
    process = subprocess.Popen(job(args, 10**8), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(8)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    wait_until(lambda: process.poll() is not None, "it does not end", 20)
    took, err = time.monotonic() - begun, process.stderr.read()
    check(process.returncode == 130 and took < 10, f"exit code {process.returncode} after {took:.1f} s")
    check("dropped" in err and "SIGKILL" not in err.splitlines()[-1], "dropped lines are counted on stderr")


def fail_unread(args, folder):
    """The cause of a failure does not wait for the reader."""
    program = 'if [ $RANK = 1 ]; then sleep 3; kill -SEGV $$; fi; while :; do echo "$(seq 1000)"; done'
    where = job(args, 1)[: job(args, 1).index("--")]
    process = subprocess.Popen(
        [*where, "--", "sh", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    begun = time.monotonic()
    line = next(line for line in process.stderr if line.startswith("FATAL"))
    took = time.monotonic() - begun
    check("RANK_DIED" in line and took < 15, f"named after {took:.1f} s: {line[:80]}")
    check(process.poll() is None, "the rest of the output waits for its reader")
    out = process.stdout.read()
    process.stderr.read()
    check(process.wait(30) == 139 and out.endswith("\n"), "the reader gets whole lines to the end")


def stdin_of_ranks(args, folder):
    data = "".join(f"line {i}\n" for i in range(200_000))
    where = job(args, 1)[: job(args, 1).index("--")]
    for ranks, readers in (("none", []), ("0", [0]), ("all", [0, 1, 2, 3])):
        done = subprocess.run(
            [*where, "--stdin", ranks, "--", "md5sum"], input=data, capture_output=True, text=True, timeout=240
        )
        digest = subprocess.run(["md5sum"], input=data, capture_output=True, text=True).stdout.split()[0]
        found = sorted(
            int(re.match(r"\[(?:\w+:)?(\d)\]", line)[1]) for line in done.stdout.splitlines() if digest in line
        )
        check(done.returncode == 0 and found == readers, f"--stdin {ranks}: ranks {found} read all of it")
    done = subprocess.run(
        [*where, "--stdin", "all", "--", "true"], input=data, capture_output=True, text=True, timeout=240
    )
    check(done.returncode == 0, "ranks need not read it")


CASES = [to_file, to_slow_pipe, to_directory, unread, stop_unread, fail_unread, stdin_of_ranks]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lockstep", required=True, type=os.path.abspath)
    parser.add_argument("--program", required=True, type=os.path.abspath)
    parser.add_argument("--megabytes", type=int, default=10)
    parser.add_argument("--ssh", action="store_true")
    parser.add_argument("cases", nargs="*", default=[case.__name__ for case in CASES])
    args = parser.parse_args()
    if args.ssh:
        host_cluster.enter_sandbox(ssh_cluster.TOOLS)
    with contextlib.ExitStack() as stack:
        if args.ssh:
            cluster = ssh_cluster.SshCluster(2, stack.enter_context(tempfile.TemporaryDirectory()))  # noqa: F841
        for case in CASES:
            if case.__name__ in args.cases:
                print(f"-- {case.__name__}", flush=True)
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                os.chdir(folder)
                case(args, folder)


if __name__ == "__main__":
    main()
