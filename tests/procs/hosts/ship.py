#!/usr/bin/env python3
"""Tests what `lockstep run --ship` copies to hosts with sshd, each a network namespace.

Usage: ship.py --lockstep PATH [CASE...]. The default is all cases. The exit code is 77 if the machine lacks what they
require.
"""

import contextlib
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import host_cluster  # noqa: E402
import ssh_cluster  # noqa: E402
from checks import check, parse_arguments  # noqa: E402
from ssh_cluster import LockstepRun  # noqa: E402

NUM_HOSTS = 2


def run_ok(*words):
    """Runs `lockstep run`, which must succeed. Returns the sorted lines of its stdout."""
    code, out, err = LockstepRun(ARGUMENTS.lockstep, *words).end()
    check(code == 0, f"{' '.join(map(str, words))[:80]}: code {code} {err[-400:] if code else ''}")
    return sorted(out.splitlines())


def expect_fatal(*words, **expected):
    return ssh_cluster.expect_fatal(ARGUMENTS.lockstep, *words, **expected)


@contextlib.contextmanager
def hidden(cluster, *folders):
    """On all hosts, other folders are mounted over these and over the home, which later has what was copied."""
    home = cluster.run_on_host(1, "sh", "-c", "echo $HOME").strip()
    places = [*folders, "/root" if home in ("", "/") else home]
    for host in (1, 2):
        for place in places:
            cluster.run_on_host(host, "mount", "-t", "tmpfs", "tmpfs", place)
    try:
        yield places[-1]
    finally:
        for host in (1, 2):
            for place in reversed(places):
                cluster.run_on_host(host, "umount", "-l", place)


def missing_files_are_copied(cluster):
    folder = pathlib.Path(cluster.folder, "only here")
    folder.mkdir()
    program = folder / "my train"
    program.write_text('#!/bin/sh\necho "$0" $RANK "$1"\n', encoding="ascii")
    program.chmod(0o755)
    with hidden(cluster, folder) as home:
        for host in (1, 2):
            cluster.run_on_host(host, "mount", "--bind", "/dev/null", ARGUMENTS.lockstep)
        for _ in range(2):  # the second run finds the staged file
            out = run_ok("-H", "h1:1,h2:1", "--ship", "--cwd", "/", program, "a b")
            check(
                len(out) == 2
                and out[0].startswith("[h1:0] ")
                and out[0].endswith("/program 0 a b")
                and "/.cache/lockstep/" in out[0],
                str(out),
            )
        listed = cluster.run_on_host(2, "find", home, "-type", "f")
        files = [one for one in listed.splitlines() if "files" not in one.rpartition("lockstep/")[2]]
        check(len(files) == 2 and listed.count("/program") == 1, listed)
        expect_fatal("-H", "h1:1,h2:1", "--cwd", "/", program, code=64, has=["cannot be executed there"])
        for host in (1, 2):
            cluster.run_on_host(host, "umount", "-l", ARGUMENTS.lockstep)


def folder_of_a_script_is_copied(cluster):
    folder = pathlib.Path(cluster.folder, "scripts")
    (folder / "package").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / ".hidden/large").write_text("not copied")
    script = folder / "train.py"
    script.write_text(
        "import os, sys\nimport package\n"
        "here = os.path.dirname(os.path.abspath(__file__))\n"
        "print(package.answer, sys.argv[1:], here, os.path.exists(here + '/.hidden'),\n"
        "      '_lockstep_hook' in sys.modules)\n"
    )
    said = []
    with hidden(cluster, folder):
        for answer in (42, 42, 43):  # copied, found, and copied again after a change
            (folder / "package/__init__.py").write_text(f"answer = {answer}\n")
            words = ("/usr/bin/python3", "-u", "-W", "ignore", script, "a b")
            out = run_ok("-H", "h1:1,h2:1", "--ship", "--cwd", "/", *words)
            good = all(
                line.startswith(f"[h{rank + 1}:{rank}] {answer} ['a b'] ")
                and "/.cache/lockstep/" in line
                and line.endswith(" False True")
                for rank, line in enumerate(out)
            )
            check(len(out) == 2 and good, str(out))
            said.append(out)
        check(said[0] == said[1] != said[2], "each content has a folder of its own")
        with open(folder / "large", "wb") as file:
            file.truncate(300 << 20)
        expect_fatal("-H", "h1:1,h2:1", "--ship", "python3", script, code=64, has=["has more than 256 MiB"])


CASES = {case.__name__: case for case in (missing_files_are_copied, folder_of_a_script_is_copied)}


def main():
    global ARGUMENTS
    ARGUMENTS = parse_arguments("lockstep")
    host_cluster.enter_sandbox(ssh_cluster.TOOLS)
    ssh_cluster.run_cases(CASES, ARGUMENTS.cases, NUM_HOSTS, 1)


main()
