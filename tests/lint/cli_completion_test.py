#!/usr/bin/env python3
"""Asks bash for completions of command lines of lockstep, as its readline does."""

import os
import re
import stat
import subprocess
import tempfile
import unittest

import cli_surface

SCRIPT = """
source "$0"
COMP_LINE=$1 COMP_POINT=${#1} COMP_CWORD=$(($# - 2))
COMP_WORDS=("${@:2}")
compopt() { kind="$*"; }
_lockstep
printf '%s\\n' "$kind" "${COMPREPLY[@]}"
"""


def complete(line, folder=None):
    """Returns the completions at the end of `line`."""
    return complete_with_options(line, folder)[1]


def is_completed_as_files(line, folder):
    """Returns whether readline is told that the completions are file names."""
    return complete_with_options(line, folder)[0] == "-o filenames"


def complete_with_options(line, folder):
    """Returns the arguments of compopt, and the completions at the end of `line`. Splits the line as bash does: at
    spaces, and before and after = and :."""
    words = re.findall(r"[=:]+|[^\s=:]+", line) + ([""] if line.endswith(" ") else [])
    done = subprocess.run(
        ["bash", "-c", SCRIPT, cli_surface.COMPLETION, line, *words],
        capture_output=True,
        text=True,
        timeout=20,
        cwd=folder,
        check=True,
    )
    assert not done.stderr, done.stderr
    options, *replies = done.stdout.split("\n")
    return options, [reply for reply in replies if reply]


class Completion(unittest.TestCase):
    def test_commands(self):
        self.assertEqual(complete("lockstep s"), ["submit", "status"])
        self.assertEqual(complete("lockstep help d"), ["doctor"])
        self.assertEqual(complete("lockstep agent "), [])

    def test_options_of_the_command(self):
        self.assertEqual(complete("lockstep run --tr"), ["--transport", "--trace"])
        self.assertEqual(complete("lockstep status --tr"), [])
        self.assertEqual(complete("lockstep submit -n 4 --ntasks-"), ["--ntasks-per-node"])

    def test_fixed_values(self):
        self.assertEqual(complete("lockstep run --transport s"), ["self", "shm"])
        self.assertEqual(complete("lockstep run --transport=s"), ["self", "shm"])
        self.assertEqual(complete("lockstep run --bind="), ["auto", "cores", "none"])
        self.assertEqual(complete("lockstep run --grace "), [])

    def test_lists_keep_their_beginning(self):
        self.assertEqual(complete("lockstep bench step --model mlp-6m,c"), ["mlp-6m,cnn-1m"])
        # bash replaces only the part after the colon.
        self.assertEqual(complete("lockstep run -H localhost:2,localhos"), ["2,localhost"])

    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("my hosts", "my.py", "my_train"):
                open(os.path.join(folder, name), "w").close()
            os.chmod(os.path.join(folder, "my_train"), stat.S_IRWXU)
            os.mkdir(os.path.join(folder, "my_logs"))
            everything = ["my hosts", "my.py", "my_logs", "my_train"]
            self.assertEqual(sorted(complete("lockstep run --hostfile my", folder)), everything)
            self.assertEqual(complete("lockstep run --output my", folder), ["my_logs"])
            self.assertEqual(sorted(complete("lockstep run -n 2 ./my", folder)), ["./my_logs", "./my_train"])
            self.assertIn("my_train", complete("lockstep run -n 2 my", folder))

    def test_only_paths_are_completed_as_files(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("bench", "mpi", "data"):
                os.mkdir(os.path.join(folder, name))
            for line in ("run --hostfile da", "run --output=da", "run -n 2 ./da", "run -n 2 ./train da"):
                self.assertTrue(is_completed_as_files(f"lockstep {line}", folder), line)
            for line in ("ben", "run --transport mp", "run --transport=mp", "help ben", "bench st", "status --t"):
                self.assertFalse(is_completed_as_files(f"lockstep {line}", folder), line)

    def test_programs_in_path(self):
        self.assertIn("bash", complete("lockstep run -n 2 -- bas"))
        self.assertNotIn("shopt", complete("lockstep run -n 2 shop"))  # a builtin of bash

    def test_arguments_of_the_program_are_files(self):
        with tempfile.TemporaryDirectory() as folder:
            open(os.path.join(folder, "data.bin"), "w").close()
            self.assertEqual(complete("lockstep run -n 2 ./train da", folder), ["data.bin"])
            self.assertEqual(complete("lockstep run -n 2 -- ./train --tr", folder), [])


class Comparison(unittest.TestCase):
    def test_differences_are_found(self):
        listed = cli_surface.listed_options(
            "  -a, --all N   all: one or two\n  --flag        a flag\n  --new         new"
        )
        self.assertEqual(listed["--all"], (True, "all: one or two"))
        completed = {"-a": (None, []), "--all": ("choice", ["one", "three"]), "--flag": (None, []), "--old": (None, [])}
        errors = list(cli_surface.completion_errors("run", listed, completed))
        self.assertEqual(len(errors), 4, errors)


if __name__ == "__main__":
    unittest.main()
