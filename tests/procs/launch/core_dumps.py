#!/usr/bin/env python3
"""Tests the core dump of a rank that is killed by SIGSEGV: its size, that it has no key, and the cause of the job.

The core contains the memory in use, but not the reserved addresses of the arena, nor the memory of other ranks, which
writing the core would otherwise allocate.

Usage: core_dumps.py --lockstep PATH --program PATH_OF_FAULT_PROBE [--runs N]. The exit code is 77 if the kernel does
not write cores into the working directory (core_pattern).
"""

import argparse
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import time
import uuid

TAG = "LOCKSTEP_TEST_TAG"
TIMEOUT = 240
MARGIN = 1.1


def find_rank(tag, rank):
    """Returns the pid of a rank of the job that has `tag` in its environment, or None."""
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            is_rank = f"{TAG}={tag}".encode() in variables and f"RANK={rank}".encode() in variables
            if is_rank and (folder / "comm").read_text().startswith("procs_"):
                return int(folder.name)
        except OSError:
            continue
    return None


def memory(pid):
    """Returns the resident memory of a process in bytes: all of it, and what belongs to no file."""
    fields = dict(line.split(":", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
    kib = {name: int(fields[name].split()[0]) for name in ("VmRSS", "RssAnon", "RssShmem")}
    return kib["VmRSS"] * 1024, (kib["RssAnon"] + kib["RssShmem"]) * 1024


def possible_keys(pid):
    """Returns the parts of the rank's page that are as random as the job's key."""
    keys = []
    for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        if not os.readlink(entry).startswith("/memfd:lockstep-rank"):
            continue
        page = pathlib.Path(entry).read_bytes()
        windows = (page[at : at + 32] for at in range(0, len(page), 4))
        keys += [window for window in windows if len(set(window)) >= 24]
    return keys


def run(args, folder):
    tag = uuid.uuid4().hex
    unlimited = resource.RLIM_INFINITY
    job = subprocess.Popen(
        [args.lockstep, "run", "-n", "2", "--hang-timeout", "0", "--", args.program, "loop", "0"],
        cwd=folder,
        env={**os.environ, TAG: tag},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (unlimited, unlimited)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        return check_core(job, tag, folder)
    finally:
        if job.poll() is None:
            job.terminate()
            job.communicate()


def check_core(job, tag, folder):
    deadline = time.monotonic() + TIMEOUT
    pid = None
    while time.monotonic() < deadline and (pid is None or not possible_keys(pid)):
        pid = find_rank(tag, 1)
        time.sleep(0.05)
    if pid is None:
        return "rank 1 did not start"
    before, now = None, memory(pid)
    while time.monotonic() < deadline and now != before:  # until it is in its loop
        time.sleep(1)
        before, now = now, memory(pid)
    resident, without_files = now
    keys = possible_keys(pid)
    os.kill(pid, signal.SIGSEGV)
    errors = job.communicate(timeout=TIMEOUT)[1]
    fatal = errors.splitlines()[-1]
    cores = list(pathlib.Path(folder).glob("core*"))
    if len(cores) != 1:
        return f"{len(cores)} cores, expected 1; {fatal}"
    core = cores[0]
    size, written = core.stat().st_size, core.stat().st_blocks * 512
    content = core.read_bytes()
    core.unlink()
    if "cause=RANK_DIED rank=1" not in fatal or "killed by SIGSEGV" not in fatal:
        return f"the cause is not the SIGSEGV: {fatal}"
    if size > resident * MARGIN or written > without_files * MARGIN:
        return f"{size} bytes, {written} of them written, of {resident} in use, {without_files} without files"
    if not keys or any(key in content for key in keys):
        return f"the key of the job is in the core ({len(keys)} candidates)"
    print(
        f"ok: {size >> 20} MiB, {written >> 20} written; in use {resident >> 20}, {without_files >> 20} without files"
    )
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--runs", type=int, default=1)
    args = parser.parse_args()
    pattern = pathlib.Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if "/" in pattern or pattern.startswith("|") or not pattern.startswith("core"):
        print(f"skipped: core_pattern is {pattern!r}, expected a file in the working directory")
        sys.exit(77)
    if resource.getrlimit(resource.RLIMIT_CORE)[1] != resource.RLIM_INFINITY and os.geteuid() != 0:
        print("skipped: ulimit -c is limited")
        sys.exit(77)
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            problem = run(args, folder)
        if problem:
            print(f"FAILED: {problem}")
            sys.exit(1)


if __name__ == "__main__":
    main()
