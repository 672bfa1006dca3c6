#!/usr/bin/env python3
"""check_console_blocks.py --bin DIR PAGE...: what the pages show on a terminal is what happens.

In each ```console block, a line `$ COMMAND` is run by a shell in an empty directory with DIR in PATH, and what it writes must have each
of the lines below it: host, process, port and hashes do not count, a line `...` stands for any others, port 29500 for a free one. A FATAL line is
the last one. In all blocks it names a cause of lockstep/base/cause.cc, and a page that shows FATAL lines has a row and a line for each cause.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIMIT = 60  # seconds for one command


def causes():
    with open(os.path.join(ROOT, "lockstep/base/cause.cc")) as file:
        return re.findall(r'Row\{Cause::\w+, "(\w+)"', file.read())


def shown(page):
    """Pairs of a command and the lines below it."""
    commands = []
    for block in re.findall(r"^```console\n(.*?)^```", page, re.S | re.M):
        for line in block.splitlines():
            if line.startswith("$ "):
                commands.append((line[2:], []))
            elif not commands:
                sys.exit(f"the console block shows a line before any command: {line}")
            elif line.strip() != "...":
                commands[-1][1].append(line)
    return commands


def plain(line):
    line = re.sub(r"\bpid=\d+", "pid=N", line)
    line = re.sub(r"\bhost=\S+", "host=H", line)
    line = re.sub(r"\b127\.0\.0\.1:\d+", "127.0.0.1:N", line)
    line = re.sub(r"\b[0-9a-f]{16}\b", "HASH", line)
    line = re.sub(r"\bfor \d+\.\d s\b", "for T s", line)
    return line.rstrip()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check_command(command, lines, bin_folder):
    environment = dict(os.environ, PATH=bin_folder + os.pathsep + os.environ["PATH"])
    command = command.replace("29500", str(free_port()))
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
    written = done.stdout + done.stderr
    came = [plain(line) for line in written.splitlines()]
    for line in lines:
        good = came[-1:] == [plain(line)] if line.startswith("FATAL ") else plain(line) in came
        if not good:
            yield f"$ {command}\n  does not write: {line}\n  but, with exit code {done.returncode}:\n{written}"


def faults(path, bin_folder):
    with open(path) as file:
        page = file.read()
    known = causes()
    used = re.findall(r"^(?:FATAL|WARN) cause=(\w+)", page, re.M)
    for cause in used:
        if cause not in known:
            yield f"FATAL cause={cause}: there is no such cause"
    if used:
        for cause in known:
            if f"\n| `{cause}` | " not in page:
                yield f"the cause {cause} has no row"
            if cause not in used and cause != "BAD_FILE":  # the program's own message
                yield f"the cause {cause} has no line that shows it"
    for command, lines in shown(page):
        if not lines:
            yield f"$ {command}\n  shows nothing that can be compared"
        yield from check_command(command, lines, bin_folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, help="where the programs are")
    parser.add_argument("pages", nargs="+", metavar="PAGE")
    options = parser.parse_args()
    num_faults = 0
    for path in options.pages:
        for fault in faults(path, os.path.abspath(options.bin)):
            num_faults += 1
            print(f"{path}: {fault}")
    sys.exit(1 if num_faults else 0)


if __name__ == "__main__":
    main()
