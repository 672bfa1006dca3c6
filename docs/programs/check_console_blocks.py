#!/usr/bin/env python3
"""Checks that the commands in pages of the documentation have the output that the pages show.

Usage: check_console_blocks.py --bin DIR PAGE...
Runs each line `$ COMMAND` of a ```console block with a shell, in an empty directory and with DIR in PATH. The output
must contain each of the lines below it. Hosts, processes, ports and hashes are not compared; a line `...` stands for
any lines, and port 29500 for an unused port. A FATAL line must be the last line of the output. FATAL lines in all
blocks must name causes of lockstep/base/cause.cc, and fatal-causes.md must have a table row and a line for each cause.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIMIT_S = 60  # for one command


def causes():
    with open(os.path.join(ROOT, "lockstep/base/cause.cc")) as file:
        return re.findall(r'Row\{Cause::\w+, "(\w+)"', file.read())


def commands_in(page):
    """Returns pairs of a command and the lines below it."""
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


def normalized(line):
    """Returns a line without values that differ between runs."""
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
            ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    output = done.stdout + done.stderr
    output_lines = [normalized(line) for line in output.splitlines()]
    for line in lines:
        expected = normalized(line)
        good = output_lines[-1:] == [expected] if line.startswith("FATAL ") else expected in output_lines
        if not good:
            yield f"$ {command}\n  does not print: {line}\n  but, with exit code {done.returncode}:\n{output}"


def errors_of_page(path, bin_folder):
    with open(path) as file:
        page = file.read()
    known = causes()
    used = re.findall(r"^(?:FATAL|WARN) cause=(\w+)", page, re.M)
    for cause in used:
        if cause not in known:
            yield f"FATAL cause={cause}: unknown cause"
    if os.path.basename(path) == "fatal-causes.md":
        for cause in known:
            if f"\n| `{cause}` | " not in page:
                yield f"the cause {cause} has no table row"
            if cause not in used and cause != "BAD_FILE":  # the message of the program
                yield f"the cause {cause} has no FATAL line"
    for command, lines in commands_in(page):
        if not lines:
            yield f"$ {command}\n  has no output on the page"
        yield from check_command(command, lines, bin_folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, help="directory of the programs")
    parser.add_argument("pages", nargs="+", metavar="PAGE")
    options = parser.parse_args()
    num_errors = 0
    for path in options.pages:
        for error in errors_of_page(path, os.path.abspath(options.bin)):
            num_errors += 1
            print(f"{path}: {error}")
    sys.exit(1 if num_errors else 0)


if __name__ == "__main__":
    main()
