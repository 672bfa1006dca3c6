#!/usr/bin/env python3
"""Tests jobs on a machine that lacks memory or processes, in a sandbox, and two jobs at once.

Usage: resource_limits.py --lockstep PATH --program PATH_OF_TRAIN_PROBE --memory-program PATH_OF_MEMORY_PROBE [CASE...].
The default is all cases. The exit code is 77 if the machine lacks what they require.
"""

import contextlib
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import history  # noqa: E402
import host_cluster  # noqa: E402
from checks import check, parse_arguments  # noqa: E402

STEPS = 100
USER_ID = 65432  # a user without other processes


def start(args, folder, *options, words=(), preexec_fn=None):
    """Starts a job of three ranks in `folder`."""
    return subprocess.Popen(
        [
            args.lockstep,
            "run",
            "-n",
            "3",
            "--bind",
            "none",
            *options,
            "--",
            args.program,
            "chaos",
            str(folder),
            str(STEPS),
            *words,
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=preexec_fn,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def hashes(folder):
    """Returns the hash after each step, which must be equal on all ranks."""
    histories = [history.read(pathlib.Path(folder), rank) for rank in range(3)]
    wrong = history.check_hashes(histories, None) + history.check_samples(histories, True)
    check(
        not wrong and all(len(history.steps(lines)) == STEPS for lines in histories),
        f"all ranks have the same hashes {wrong}",
    )
    return [line["hash"] for line in history.steps(histories[0])]


def full_dev_shm(args, folder):
    host_cluster.sh("mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", "/dev/shm")
    pathlib.Path("/dev/shm/full").write_bytes(bytes(4096))
    try:
        job = start(args, folder, "--transport", "shm")
        _, err = job.communicate(timeout=240)
        check(job.returncode == 0, f"exit code {job.returncode} {err[-300:]}")
        hashes(folder)
    finally:
        host_cluster.sh("umount", "/dev/shm")


def two_jobs_at_once(args, folder):
    folders = [pathlib.Path(folder) / name for name in ("one", "two")]
    jobs = []
    for one in folders:
        one.mkdir()
        jobs.append(start(args, one))
    for job in jobs:
        _, err = job.communicate(timeout=240)
        check(job.returncode == 0, f"exit code {job.returncode} {err[-300:]}")
    check(hashes(folders[0]) == hashes(folders[1]), "both jobs have the same hashes")


def process_limit(args, folder):
    os.chown(folder, USER_ID, USER_ID)
    limited = ["setpriv", f"--reuid={USER_ID}", f"--regid={USER_ID}", "--clear-groups", "prlimit", "--nproc=4"]
    job = subprocess.Popen(
        [*limited, args.lockstep, "run", "-n", "8", "sleep", "30"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, err = job.communicate(timeout=20)
    check(
        job.returncode == 74 and err.rstrip().rsplit("\n", 1)[-1].startswith("FATAL cause=RESOURCE"),
        f"exit code {job.returncode}: {err[-300:]}",
    )
    check("Resource temporarily unavailable" in err, "the error contains the reason of the system")
    left = subprocess.run(
        ["ps", "-u", str(USER_ID), "-o", "pid="], capture_output=True, text=True, check=False
    ).stdout.split()
    check(not left, f"no process is left {left}")


def stop_waits_for_slow_stack_dump(args, folder):
    tool = pathlib.Path(folder) / "slow-stack"
    tool.write_text("#!/bin/sh\nsleep 2.5\necho a slow stack\n")
    tool.chmod(0o755)
    real = subprocess.run(
        ["sh", "-c", "PATH=/usr/local/bin:/usr/bin:/bin command -v eu-stack"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    if not real:
        host_cluster.skip("eu-stack is not installed (Debian: elfutils)")
    host_cluster.sh("mount", "--bind", tool, real)
    try:
        begin = time.monotonic()
        job = start(args, folder, "--hang-timeout", "3", "--name", "it", words=("deadlock", "1", "30"))
        _, err = job.communicate(timeout=240)
        check(job.returncode == 124, f"exit code {job.returncode} {err[-300:]}")
        check("a slow stack" in (pathlib.Path(folder) / "runs/it/stack.1.txt").read_text(), "the stack was written")
        check(time.monotonic() - begin < 20, "the job ended in time")
    finally:
        host_cluster.sh("umount", real)


def address_space_limit(args, folder):
    """ulimit -v, as PBS and SGE set it: the arenas fit, and one line per rank says so."""
    limit = 12 << 30
    job = start(
        args, folder, "--transport", "shm", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit,) * 2)
    )
    _, err = job.communicate(timeout=240)
    check(job.returncode == 0, f"exit code {job.returncode} {err[-300:]}")
    check(err.count("limited to 12288 MiB (ulimit -v)") == 3, err[-600:])
    hashes(folder)


def run_memory_probe(args, folder, ranks, words, options=(), program=(), preexec_fn=None):
    """Returns the result of a job of memory_probe, started by `program`, and the last line of its stderr."""
    job = subprocess.run(
        [args.lockstep, "run", "-n", str(ranks), "--bind", "none", *options, "--"]
        + [*program, args.memory_program, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=preexec_fn,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return job, job.stderr.rstrip().rsplit("\n", 1)[-1]


def expect_resource(args, folder, ranks, words, parts, **options):
    """The job must end with one line of cause RESOURCE that contains all `parts`."""
    job, last = run_memory_probe(args, folder, ranks, words, **options)
    what = f"{ranks} ranks, {' '.join(words)}"
    check(job.returncode == 74 and last.startswith("FATAL cause=RESOURCE rank="), f"{what}: {job.returncode} {last}")
    check(job.stderr.count("FATAL") == 1, f"{what}: one FATAL line")
    missing = [part for part in parts if part not in last]
    check(not missing, f"{what}: the line contains all parts {missing}")


@contextlib.contextmanager
def memory_group(mib):
    """Creates a control group with a limit of `mib`, of the version that this machine has."""
    first = pathlib.Path("/sys/fs/cgroup/memory")
    root, limit = (first, "memory.limit_in_bytes") if first.is_dir() else (first.parent, "memory.max")
    group = root / f"lockstep-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        host_cluster.skip(f"cannot create a control group: {error}")
    try:
        try:
            (group / limit).write_text(str(mib << 20))
        except OSError as error:
            host_cluster.skip(f"cannot limit the memory of a control group: {error}")
        yield group, group / limit
    finally:
        group.rmdir()


def oom_kills(group):
    text = "".join(
        (group / name).read_text() for name in ("memory.events", "memory.oom_control") if (group / name).exists()
    )
    return [line for line in text.splitlines() if line.startswith("oom_kill ")]


def control_group_limit(args, folder):
    """The ranks of a container with a memory limit: no rank is killed, whatever needs the memory."""
    tensors = ("tensors", str(2 * args.group_mib))
    for ranks in (2, 3):
        with memory_group(args.group_mib) as (group, limit):

            def enter(procs=group / "cgroup.procs"):
                procs.write_text("0")

            common = [
                f"the control group {group} has ",
                f" MiB of {args.group_mib} MiB left ({limit.name})",
                "must stay free",
            ]
            common += [
                "the ranks of this job share ",
                "rank 1 of this job) ",
                "raise the memory limit of the container",
            ]
            for words in (tensors, ("train", str(args.group_mib // 4))):
                expect_resource(args, folder, ranks, words, common, preexec_fn=enter)
            restart = ("--max-restarts", "1", "--restart-pause", "0")
            gen_1 = [*common, " gen=1 "]
            expect_resource(args, folder, ranks, tensors, gen_1, options=restart, preexec_fn=enter)
            check(oom_kills(group) == ["oom_kill 0"], f"the kernel killed no process {oom_kills(group)}")
            # Memory outside the arena: the kernel kills a rank, and the launcher reports it.
            job, last = run_memory_probe(args, folder, ranks, ("private", str(2 * args.group_mib)), preexec_fn=enter)
            check(
                job.returncode == 137 and "cause=RANK_DIED" in last and "out-of-memory kill" in last,
                f"{ranks} ranks, private: {job.returncode} {last}",
            )


def refused_memory(args, folder):
    """The kernel refuses shared memory to one rank, as it does without overcommit."""
    host_cluster.sh("mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", "/dev/shm")
    try:
        with open("/dev/shm/left", "wb") as file:
            file.write(bytes(200 << 20))
        for ranks in (2, 3):
            for words in (("tensors", "64"), ("train", "64"), ("groups", "64")):
                parts = ["the kernel refuses it (No space left on device)", " MiB left (/proc/meminfo, "]
                parts += ["files in /dev/shm (the largest: /dev/shm/left, 200 MiB) 200 MiB", "use fewer ranks"]
                expect_resource(args, folder, ranks, (*words, "refused"), parts)
            parts += ["op=optimizer ", "parameters and state shared by the ranks of this host: no memory for 192 MiB"]
            expect_resource(args, folder, ranks, ("train", "64", "refused_late"), parts)
    finally:
        host_cluster.sh("umount", "/dev/shm")


def file_size_limit(args, folder):
    """ulimit -f applies to shared memory as well, and would end a rank by SIGXFSZ."""
    for ranks in (2, 3):
        for kib, words in ((8, ("tensors", "16")), (100 << 10, ("tensors", "160"))):
            limited = ("sh", "-c", f'ulimit -f {kib * 2}; exec "$@"', "sh")  # in units of 512 bytes
            expect_resource(
                args, folder, ranks, words, ["ulimit -f limits the arena", "raise ulimit -f"], program=limited
            )


CASES = {
    case.__name__: case
    for case in (
        address_space_limit,
        control_group_limit,
        file_size_limit,
        refused_memory,
        full_dev_shm,
        two_jobs_at_once,
        process_limit,
        stop_waits_for_slow_stack_dump,
    )
}


def main():
    args = parse_arguments("lockstep", "program", "memory-program", **{"group-mib": 500})
    host_cluster.enter_sandbox(("mount", "setpriv", "prlimit"))
    for name in args.cases or list(CASES):
        with tempfile.TemporaryDirectory() as folder:
            CASES[name](args, folder)


main()
