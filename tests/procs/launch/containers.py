#!/usr/bin/env python3
"""Tests what a container lacks: each case works, or ends with one line and the right remedy.

Usage: containers.py --lockstep PROGRAM --python INTERPRETER --package FOLDER [CASE ...]
Containers are namespaces of this machine. Each case runs as root and, where that differs, as a user who has no name and
is root's only in the group, as in OpenShift. The exit code is 77 if there can be no namespaces.
"""

import contextlib
import ctypes
import os
import pathlib
import re
import signal
import stat
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import host_cluster  # noqa: E402
from checks import check, parse_arguments, wait_until  # noqa: E402

ARGS = parse_arguments("lockstep", "python", "package")
PROGRAM = pathlib.Path(__file__).with_name("container_program.py")
USER = "1000870000"
AS_USER = ["setpriv", f"--reuid={USER}", "--regid=0", "--clear-groups", "--bounding-set=-all"]
USERS = ([], AS_USER)


def name_of(user):
    return "a user without a name" if user else "root"


def environment(**variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_") and name != "TMPDIR"}
    kept |= {"PYTHONPATH": ARGS.package, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", **variables}
    return {name: value for name, value in kept.items() if value is not None}


def job(what, *options):
    return [ARGS.lockstep, "run", "-n", "2", "--bind", "none", *options, "--", ARGS.python, str(PROGRAM), what]


def run(words, folder, user=(), setup="", limit_s=100, preexec_fn=None, **variables):
    """Runs `words` as `user` after the commands `setup`, in a mount namespace. Returns the exit code and the output."""
    os.chmod(folder, 0o777)
    script = f'set -e; {setup or ":"}; exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "--uts", "sh", "-c", script, "sh", *user, *words],
        cwd=folder,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        preexec_fn=preexec_fn,
        check=False,
    )
    return done.returncode, done.stdout


def last_line(said):
    return said.rstrip().rsplit("\n", 1)[-1]


def works(what, result, text="trained "):
    code, said = result
    check(code == 0 and said.count(text) == 2, f"{what} works" + ("" if code == 0 else f": {code} {said[-1500:]}"))


def fails(what, result, *parts):
    """The job ends with one FATAL line, the last one, that contains all `parts`."""
    code, said = result
    missing = [part for part in parts if part not in last_line(said)]
    good = code != 0 and said.count("FATAL") == 1 and last_line(said).startswith("FATAL ") and not missing
    check(good, f"{what}: one line with the remedy" + ("" if good else f"; {missing}: {code} {said[-1500:]}"))


SMALL = "mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm"
# /dev without shm.
NONE = (
    "mkdir -p dev; mount -t tmpfs tmpfs dev; for d in null zero full random urandom tty; do cp -a /dev/$d dev/; done; "
    "ln -s /proc/self/fd dev/fd; mount --move dev /dev"
)


def case_1_small_dev_shm(folder):
    for user in USERS:
        for size, setup in (("64 MiB", SMALL), ("none", NONE)):
            result = run(job("train", "--transport", "shm"), folder, user, setup)
            works(f"/dev/shm: {size}, {name_of(user)}: shared memory of the ranks", result, "over shm")


def case_2_dataloader(folder):
    for size, setup in (("64 MiB", SMALL), ("none", NONE)):
        parts = ["emptyDir with medium: Memory", "/dev/shm"] + (["--shm-size"] if setup == SMALL else [])
        for user in USERS:
            fails(f"/dev/shm: {size}, {name_of(user)}: a DataLoader", run(job("loader"), folder, user, setup), *parts)


def case_3_read_only_root(folder):
    mounts = "/ /tmp /var/tmp /dev/shm /run"
    read_only = f"for m in {mounts}; do ! mountpoint -q $m || mount -o remount,bind,ro $m; done"
    with tempfile.TemporaryDirectory(dir="/run") as writable:
        with_volume = f"mount -t tmpfs -o mode=1777 tmpfs {writable}; {read_only}"
        for user in USERS:
            for what, text in (("train", "trained "), ("gloo", "sum 2")):
                result = run(job(what), folder, user, with_volume, TMPDIR=writable)
                works(f"a read-only root, TMPDIR elsewhere, {name_of(user)}: {what}", result, text)
                result = run(job(what), folder, user, read_only)
                works(f"a read-only root without TMPDIR, {name_of(user)}: {what}", result, text)
            result = run(job("tempfile"), folder, user, read_only)
            fails(f"the same, {name_of(user)}: a temporary file", result, "set TMPDIR", "emptyDir")
            result = run(job("save"), folder, user, read_only)
            fails(f"the same, {name_of(user)}: a file", result, "a folder on a volume", "--cwd")


def case_4_no_passwd_entry(folder):
    works("a user without a name: the package", run(job("train"), folder, AS_USER))
    works("a user without a name: torch.distributed", run(job("gloo"), folder, AS_USER), "sum 2")


def case_5_no_home(folder):
    for user in USERS:
        works(f"no HOME, {name_of(user)}", run(job("train"), folder, user, HOME=None, USER=None, LOGNAME=None))
        works(f"a HOME that does not exist, {name_of(user)}", run(job("train"), folder, user, HOME="/nonexistent"))


def case_6_no_proc(folder):
    for user in USERS:
        code, said = run(job("train"), folder, user, "mount -t tmpfs tmpfs /proc")
        lines = said.strip().splitlines()
        good = code == 64 and len(lines) == 1 and "/proc" in lines[0]
        check(good, f"no /proc, {name_of(user)}: one line says so" + ("" if good else f": {code} {said[-1500:]}"))


def deny_ptrace():
    """As Docker's profile on kernels before 4.8: ptrace() and process_vm_readv() fail with EPERM."""
    load, equal, give, allow, eperm = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050001
    code = [(load, 0, 0, 0), (equal, 2, 0, 101), (equal, 1, 0, 310), (give, 0, 0, allow), (give, 0, 0, eperm)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    filter_ = ctypes.create_string_buffer(struct.pack("HP", len(code), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    set_no_new_privs, set_seccomp = 38, 22
    if libc.prctl(set_no_new_privs, 1, 0, 0, 0) or libc.prctl(set_seccomp, 2, filter_, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def case_7_no_ptrace(folder):
    """Stacks cannot be read: the job still ends in time, and names the rank."""
    result = run(job("stuck", "--hang-timeout", "5", "--name", "it"), folder, limit_s=60, preexec_fn=deny_ptrace)
    fails("no ptrace(): a hang", result, "cause=RANK_STUCK rank=1")
    text = pathlib.Path(folder, "runs/it/stack.1.txt").read_text()
    check(PROGRAM.name in text, "the file of the stack has that of Python")


def case_8_process_1(folder):
    for user in USERS:
        with subprocess.Popen(
            ["unshare", "--pid", "--mount-proc", "--fork", "--kill-child", *user, *job("orphan")],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as outer:
            try:
                for _ in range(2):
                    for line in outer.stdout:
                        if "waits" in line:
                            break
                first = int(pathlib.Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text())
                inside = f"/proc/{first}/root/proc"

                def orphans(inside=inside):
                    states = [re.search(r"\((.*)\) (.)", text) for text in stats(inside)]
                    return [state.group(2) for state in states if state and state.group(1) == "sleep"]

                wait_until(lambda: not orphans(), "the launcher reaps no orphans")
                os.kill(first, signal.SIGTERM)
                said, _ = outer.communicate(timeout=30)
            finally:
                outer.kill()
        good = outer.returncode == 143 and last_line(said).startswith("FATAL cause=INTERRUPTED")
        what = f"process 1, {name_of(user)}: SIGTERM ends it, orphans are reaped"
        check(good, what + ("" if good else f": {outer.returncode} {said[-600:]}"))


def stats(proc):
    for path in pathlib.Path(proc).glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            yield path.read_text()


def case_9_host_name_does_not_resolve(folder):
    for user in USERS:
        for what, text in (("train", "trained "), ("gloo", "sum 2")):
            result = run(job(what), folder, user, "hostname name-without-address")
            works(f"a host name without an address, {name_of(user)}: {what}", result, text)


CASES = {name: value for name, value in globals().items() if name.startswith("case_")}


def open_closed_folders():
    """Lets the user reach the interpreter and the programs, which may be in root's home: covers each folder that only
    its owner may enter by one with the same entries, as far as they are needed."""
    needed = [pathlib.Path(path) for path in (ARGS.lockstep, ARGS.python, ARGS.package, PROGRAM)]
    needed += [path.resolve() for path in needed]
    closed = {parent for path in needed for parent in path.parents if not parent.stat().st_mode & stat.S_IXOTH}
    for number, folder in enumerate(sorted(closed)):
        entries = {path.relative_to(folder).parts[0] for path in needed if folder in path.parents}
        kept = pathlib.Path(f"/run/closed-{number}")
        kept.mkdir()
        host_cluster.sh("mount", "--rbind", folder, kept)
        host_cluster.sh("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", folder)
        for entry in entries:
            (folder / entry).mkdir()
            host_cluster.sh("mount", "--rbind", kept / entry, folder / entry)


def main():
    host_cluster.enter_sandbox(("ip", "mount", "setpriv"))
    open_closed_folders()
    for name in ARGS.cases or CASES:
        print(f"--- {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="lockstep-containers-") as folder:
            CASES[name](folder)


main()
