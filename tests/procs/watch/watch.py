#!/usr/bin/env python3
"""Tests how `lockstep run` watches Python programs that use torch.distributed and not Lockstep.

Usage: watch.py --lockstep PROGRAM --hook FOLDER [--package FOLDER] [--python INTERPRETER] [--device cuda] [--ranks N]
                [--limit SECONDS] [--jobs N] [--runs N] [--only NAME,...] [--group NAME]
With --device cuda the ranks use NCCL and share the GPU. --runs repeats the cases of HANGS and WORKS. The exit code is
77 if there is no Python with torch.
"""

import argparse
import concurrent.futures
import http.server
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
from checks import check  # noqa: E402

PROGRAM = pathlib.Path(__file__).with_name("torch_program.py")
END_S = 7  # from the limit to the end of the job
# What the last rank does: option, cause, the operation in which the FATAL line says that others wait, the function in
# which the last rank is.
HANGS = {
    "barrier": ("--hang-timeout", "RANK_STUCK", r"barrier#11 of world", "misbehave"),
    "backward": (
        "--hang-timeout",
        "RANK_STUCK",
        r"all_reduce#11 of world, 40400 bytes of float32",
        "misbehave",
    ),
    "recv": ("--hang-timeout", "RANK_STUCK", r"recv#1 of Python calls", "misbehave"),
    "worker": ("--hang-timeout", "RANK_STUCK", r"barrier#11 of world", "misbehave"),
    "spinning": ("--hang-timeout", "RANK_STUCK", r"barrier#11 of world", "misbehave"),
    "stop": ("--stall-timeout", "RANK_STALLED", r"barrier#11 of world", ""),
    "loop": ("--work-timeout", "RANK_STUCK", r"barrier#11 of world", "spin"),
    "async": ("--hang-timeout", "RANK_STUCK", r"all_reduce#11 of world, 12 bytes of float32", "misbehave"),
    "store": ("--hang-timeout", "RANK_STUCK", r"Store.wait#\d+ of Python calls", "misbehave"),
    "init": ("--hang-timeout", "RANK_STUCK", r"init_group#1 of Python calls", "misbehave"),
}
# Beside the backend "lockstep", whose own group has other numbers, in a group of its own.
GROUPS = {"gloo": ("gloo", None), "lockstep": ("lockstep", None), "beside": ("lockstep", "gloo")}
IN_DEFAULT_GROUP = ("backward", "store", "init")
WORKS = ("evaluate", "compile", "download", "save")
WORK_S = 15


def run(args, what, *words, program=PROGRAM, ranks=3, options=(), folder=None, env=()):
    command = [args.lockstep, "run", "-n", ranks, "--bind", "none", *options, "--", args.python, program, what, *words]
    begin = time.monotonic()
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": args.package, **dict(env)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, time.monotonic() - begin


def fatal_of(output):
    lines = [line for line in output.splitlines() if line.startswith("FATAL ")]
    return dict(re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', lines[-1])) if lines else {}


def operation_in(group, operation):
    """A regular expression for an operation of HANGS in a group of GROUPS."""
    if group == "gloo" or "Python calls" in operation and not operation.startswith("recv"):
        return operation
    channel = r"c10d\.\S+" if group == "lockstep" else r"(group \d+|Python calls)"
    return re.sub(r"#\d+ of (world|Python calls)", lambda _: rf"(\(.*\))?#\d+ of {channel}", operation)


def words_of(group):
    """The options of the program for one of GROUPS."""
    backend, own_group = GROUPS[group]
    return ("--backend", backend, *(("--group", own_group) if own_group else ()))


def ranks_listed(what, output):
    """The ranks in the lines that say this of them."""
    lists = re.finditer(rf"^  ranks? ([\d,]+), {what}", output, re.MULTILINE)
    return {int(rank) for found in lists for rank in found[1].split(",")}


def test_hang(args, what):
    """The job ends, and the rank, the collective and the line of the program are named."""
    option, cause, operation, function = HANGS[what]
    operation = operation_in(args.group, operation)
    # What a rank does before its first step is work too, and takes long on a machine that is busy.
    limit = args.limit * 4 if what == "loop" else args.limit
    last, options = args.ranks - 1, [option, limit, "--name", "it"]
    if args.device == "cuda":
        options.append("--share-gpus")
    with tempfile.TemporaryDirectory() as folder:
        words = (300, "--device", args.device, *words_of(args.group))
        code, output, _ = run(args, what, *words, ranks=args.ranks, options=options, folder=folder)
        fatal = fatal_of(output)
        since = time.monotonic() - float(pathlib.Path(folder, "begun").read_text())
        file = pathlib.Path(folder, f"runs/it/stack.{last}.txt")
        stacks = file.read_text() if file.exists() else ""
    step = "-" if what == "init" else "5"
    good = code == 124 and (fatal.get("cause"), fatal.get("rank"), fatal.get("step")) == (cause, str(last), step)
    check(good and re.search(rf"waits? in {operation}", fatal["detail"]), f"{what}: {output}")
    at = re.search(r"it is at (\S+):(\d+) in (\w+)", fatal["detail"])
    if function:
        check(at and at[1] == str(PROGRAM) and at[3] == function, f"{what}: the Python line in {fatal['detail']}")
        check("Python stacks of process" in stacks and "misbehave" in stacks, f"{what}: the stacks are in the file")
    if what == "worker":
        check("(pt_data_worker) is at" in fatal["detail"] and "__getitem__" in stacks, "worker: its line is named too")
    listed = set(range(last)) <= ranks_listed(rf"step [56]: waits in {operation}", output)
    # Over NCCL, backward() and the step after it return before the sum.
    check(listed or what in ("recv", "init", "store"), f"{what}: all are listed: {output if not listed else ''}")
    check(since < limit + END_S, f"{what}: ended {since:.1f} s later")


def test_desync(args):
    """Ranks that wait for each other in different collectives: both calls are in the line."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("--hang-timeout", args.limit)
        _, output, _ = run(args, "desync", 300, *words_of(args.group), options=options, folder=folder)
    fatal = fatal_of(output)
    good = fatal.get("cause") == "DESYNC" and "barrier" in fatal["detail"] and "all_reduce" in fatal["detail"]
    # Lockstep compares two ranks, and names one of them.
    check(good and (args.group == "lockstep" or fatal["rank"] == "2"), f"desync: {output}")


def test_finally(args):
    """A rank whose clean-up makes a call that the others do not make: its exception is the cause, not that call."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("--hang-timeout", args.limit)
        code, output, _ = run(args, "finally", 300, *words_of(args.group), options=options, folder=folder)
    fatal = fatal_of(output)
    good = code == 1 and (fatal.get("cause"), fatal.get("rank")) == ("RANK_EXITED", "2")
    check(good and "LookupError: sample 1234 has no label; then" in fatal["detail"], f"finally: {output}")


def test_left(args):
    """A rank that has left its world, and does not end, is named."""
    with tempfile.TemporaryDirectory() as folder:
        code, output, _ = run(args, "left", 300, options=("--hang-timeout", args.limit), folder=folder)
    fatal = fatal_of(output)
    good = code == 124 and fatal["rank"] == "2" and "rank 2 has left its world" in fatal["detail"]
    check(good and output.count("finished") == 2 + fatal["detail"].count("finished"), f"left: {output}")


def test_straggler(args):
    """A rank for which the others wait in every step is named in a warning, and the job goes on."""
    with tempfile.TemporaryDirectory() as folder:
        code, output, _ = run(args, "straggler", 45, folder=folder)
    warnings = [line for line in output.splitlines() if "cause=STRAGGLER" in line]
    good = code == 0 and len(warnings) == 1 and re.search(r"rank=2 host=\S+ pid=\d+ .* times as long", warnings[0])
    check(good, f"straggler: {warnings or output}")


class SlowServer:
    """Sends 10 KB per second for WORK_S seconds."""

    def __enter__(self):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                end = time.monotonic() + WORK_S
                while time.monotonic() < end:
                    self.wfile.write(b"x" * 1000)
                    time.sleep(0.1)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def test_work(args):
    """A rank that works for three times the limit is left alone."""
    with (
        SlowServer() as address,
        concurrent.futures.ThreadPoolExecutor() as pool,
        tempfile.TemporaryDirectory() as folder,
    ):
        options = ("--hang-timeout", WORK_S // 3)
        words = (WORK_S, "--address", address, *words_of(args.group))
        if args.group == "lockstep":  # over Gloo, a pending operation counts as a wait
            words += ("--pending",)
        jobs = {
            what: pool.submit(run, args, what, *words, ranks=2, options=options, folder=folder)
            for what in WORKS
            if not args.only or what in args.only
        }
        for what, job in jobs.items():
            code, output, seconds = job.result()
            check(code == 0 and seconds > WORK_S, f"{what}: {seconds:.1f} s, {output}")


def test_other_programs(args):
    """Without torch.distributed nothing changes; the user's sitecustomize runs; LOCKSTEP_WATCH=off switches it off."""
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "sitecustomize.py").write_text("print('own sitecustomize')\n")
        command = [args.lockstep, "run", "-n", "2", "--", args.python, "-c", "import sys; print('done', len(sys.argv))"]
        env = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
        check(
            done.returncode == 0
            and done.stdout.count("own sitecustomize") == 2
            and done.stdout.count("done 1") == 2
            and done.stderr == "",
            f"a program without torch: {done.stdout}{done.stderr}",
        )
        options, env = ("--hang-timeout", 3), {"LOCKSTEP_WATCH": "off"}
        code, output, _ = run(args, "sleep", 8, ranks=2, options=options, env=env, folder=folder)
    check(code == 0 and "lockstep" not in output, f"switched off: {output}")


SLOW_RECORDER = """
import atexit, sys, threading, time
import torch.distributed as dist
from torch._C import _distributed_c10d

def end():
    print("thread", any(thread.name == "lockstep-watch" for thread in threading.enumerate()), flush=True)

def dump(*_):
    looks.release()
    time.sleep(1)  # and once more for the other recorder
    return "{}"

looks = threading.Semaphore(0)
atexit.register(end)
_distributed_c10d._dump_fr_trace_json = _distributed_c10d._dump_nccl_trace_json = dump
dist.init_process_group("gloo")
looks.acquire()
if sys.argv[1] == "raise":
    raise SystemError("it has failed")
"""


def test_end(args):
    """The hook's thread reads the recorder at the end of the program: it ends before the interpreter does."""
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder, "slow.py")
        program.write_text(SLOW_RECORDER)
        for what, expected in (("return", 0), ("raise", 1)):
            code, output, _ = run(args, what, program=program, ranks=1, folder=folder)
            check(code == expected and "thread False" in output, f"end, {what}: {code}, {output}")


NO_THREADS = """
import os
import threading
import torch
import torch.distributed as dist

start = threading.Thread.start

def start_others(thread):
    if thread.name == "lockstep-watch":
        raise RuntimeError("can't start new thread")
    start(thread)

threading.Thread.start = start_others
for store in ("a", "b"):  # a rank that is ahead could still find the first store at MASTER_PORT
    dist.init_process_group("gloo", f"file://{__file__}.{store}", rank=int(os.environ["RANK"]), world_size=2)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
print("finished", flush=True)
"""


def test_no_threads(args):
    """A program that may have no more threads runs, unwatched."""
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder, "few.py")
        program.write_text(NO_THREADS)
        code, output, _ = run(args, "run", program=program, ranks=2, folder=folder)
        warnings = output.count("warning: this rank is not watched any more: RuntimeError")
        check((code, output.count("finished"), warnings) == (0, 2, 2), f"no threads: {code}, {output}")


FORKS = """
import ctypes, multiprocessing, os, sys, time
import torch.distributed as dist
from _lockstep_hook import watch

def lock(c, of_threads):
    c.PyThread_acquire_lock.argtypes = (ctypes.c_void_p, ctypes.c_int)
    c.PyThread_acquire_lock(of_threads, 1)

dist.init_process_group("gloo")
guard, c = watch._open_library().lockstep_watch_guard_forks, ctypes.CDLL(None)
guard.restype = ctypes.c_void_p
of_threads = ctypes.c_void_p(guard())
assert of_threads, "the lock was not found"
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the thread that releases the lock begins after the fork
if sys.argv[1] == "guarded":
    for _ in range(20):
        thread = ctypes.c_ulong()
        lock(c, of_threads)
        c.pthread_create(ctypes.byref(thread), None, c.PyThread_release_lock, of_threads)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        c.pthread_join(thread, None)
else:
    worker = multiprocessing.get_context("fork").Process(target=print)
    lock(c, of_threads)
    worker.start()
    c.PyThread_release_lock(of_threads)
    worker.join()
print("finished", flush=True)
"""


def test_forks(args):
    """A fork waits while another thread has the lock of CPython's thread states, which older versions of CPython need
    in the child; a child that hangs for it all the same is named."""
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder, "forks.py")
        program.write_text(FORKS)
        version = subprocess.run([args.python, "-V"], capture_output=True, text=True, check=True).stdout.split()[1]
        if tuple(map(int, version.split("."))) >= (3, 11, 10):
            print("skipped: forks, which need no guard with CPython", version)
            return
        code, output, _ = run(args, "guarded", program=program, ranks=2, options=("--hang-timeout", 5), folder=folder)
        check(code == 0 and output.count("finished") == 2, f"guarded forks: {output}")
        code, output, _ = run(args, "hang", program=program, ranks=2, options=("--hang-timeout", 5), folder=folder)
        check(code == 124 and "hangs in os.fork()" in fatal_of(output)["detail"], f"a fork that hangs: {output}")


def test_broken_hook(args):
    """An error in the hook is one warning, and the program goes on."""
    with tempfile.TemporaryDirectory() as folder:
        hook = pathlib.Path(folder, "_lockstep_hook")
        shutil.copytree(args.hook, hook)
        (hook / "liblockstep_watch.so").write_text("no library")
        env = {
            **os.environ,
            "PYTHONPATH": str(hook / "path"),
            "LOCKSTEP_PAGE": "99",
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
        for broken in (True, False):
            if not broken:
                shutil.copy(pathlib.Path(args.hook, "liblockstep_watch.so"), hook)
            done = subprocess.run(
                [args.python, PROGRAM, "sleep", "0"],
                env=env,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
            warnings = done.stderr.count("lockstep: warning: this rank is not watched any more: OSError")
            check(
                done.returncode == 0 and "finished" in done.stdout and warnings == broken,
                f"a broken hook: {done.stdout}{done.stderr}",
            )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True, type=os.path.abspath)
    parser.add_argument("--hook", required=True, type=os.path.abspath)
    parser.add_argument("--package", default="", help="with the backend lockstep")
    parser.add_argument("--python", default="")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=3, help="of the cases of HANGS")
    parser.add_argument("--limit", type=int, default=5, help="of the cases of HANGS")
    parser.add_argument("--jobs", type=int, default=3, help="cases of HANGS at a time")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--group", choices=GROUPS, default="gloo")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    args = parser.parse_args()
    if not args.python:
        print("skipped: no Python with torch (scripts/setup.sh installs one)")
        sys.exit(77)
    hangs = [what for what in HANGS if not (args.group == "beside" and what in IN_DEFAULT_GROUP)]
    tests = [test_desync, test_finally, *([test_straggler, test_left] if args.group == "gloo" else [])]
    for _ in range(args.runs):
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:  # their ranks sleep most of the time
            jobs = [pool.submit(test_hang, args, what) for what in hangs if not args.only or what in args.only]
            for test in tests:
                if not args.only or test.__name__.removeprefix("test_") in args.only:
                    jobs.append(pool.submit(test, args))
            for job in jobs:
                job.result()
        if args.group != "beside" and (not args.only or "work" in args.only):
            test_work(args)
    if not args.only and args.group == "gloo":
        test_other_programs(args)
        test_end(args)
        test_no_threads(args)
        test_forks(args)
        test_broken_hook(args)


if __name__ == "__main__":
    main()
