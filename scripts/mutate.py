#!/usr/bin/env python3
"""Puts known bugs back into the code, one at a time, and shows that the tests catch each.

mutate.py                      every bug in tests/mutations/*.toml
mutate.py NAME... --module M   those bugs, or those of one file tests/mutations/M.toml
mutate.py --check              only checks, in seconds, that every bug still fits the code

A bug is a table in tests/mutations/MODULE.toml:

    [name_of_the_bug]
    bug = "what is broken, in one line"
    file = "lockstep/data/sampler.cc"
    function = "EpochOrder::operator[]"   # or a class; omitted for code at namespace scope
    old = 'position_ + k'                 # occurs exactly once there, whatever the white space and line breaks
    new = 'k'
    in_string = true                      # only if `old` is a part of a string literal
    targets = ["unit_data"]               # CMake targets to build
    tests = '^unit/data$'                 # a regular expression for ctest -R; with the bug, one of these tests fails
    cases = "Sampler.*:Position.*"        # optional: a GTEST_FILTER for the tests of a whole executable

Works in build/mutate on a copy of what is committed; later runs build only what has changed. Prints a table with the
test cases that failed, and exits with 1 when a bug survived, does not compile or names no test, and with 2 when one no
longer fits the code."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from typing import NamedTuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "scripts"))

from cpp_text import matches  # noqa: E402

TIME_LIMIT_SECONDS = 600
REQUIRED = {"bug": str, "file": str, "old": str, "new": str, "targets": list, "tests": str}
OPTIONAL = {"function": str, "in_string": bool, "cases": str}


FAILED_TEST = r"^\s*\d+ - (\S+)(?: .*)? \((?:Failed|Timeout|SEGFAULT|Subprocess .*|.*Exception.*)\)"
FAILED_CASE = r"^(?:.*: )?\[\s*FAILED\s*\] (\w+\.\S+)$"


class Mutation(NamedTuple):
    name: str
    bug: str
    file: str
    old: str
    new: str
    targets: list
    tests: str
    function: str = ""
    in_string: bool = False
    cases: str = ""

    def applied_to(self, text):
        """Returns `text` with the bug in it. Raises ValueError unless `old` occurs exactly once."""
        found = matches(text, self.old, self.function, self.in_string)
        if len(found) != 1:
            where = f"{self.function} of {self.file}" if self.function else self.file
            raise ValueError(f"`old` occurs {len(found)} times in {where}; expected once")
        begin, end = found[0]
        return text[:begin] + self.new + text[end:]


def parse(text):
    """Returns the mutations in the text of one TOML file. Raises ValueError."""
    found = []
    for name, table in tomllib.loads(text).items():
        for key, kind in REQUIRED.items():
            if not isinstance(table.get(key), kind):
                raise ValueError(f"{name}: {key}: expected a {kind.__name__}")
        for key, value in table.items():
            if key not in REQUIRED and not isinstance(value, OPTIONAL.get(key, ())):
                raise ValueError(f"{name}: unknown key or wrong type: {key}")
        found.append(Mutation(name=name, **table))
    return found


def read(folder):
    """Returns the mutations of each module."""
    modules = {}
    for file in sorted(os.listdir(folder)):
        if file.endswith(".toml"):
            with open(os.path.join(folder, file), encoding="utf-8") as stream:
                modules[file[: -len(".toml")]] = parse(stream.read())
    return modules


class Tree:
    """A copy of the code and its build directory."""

    def __init__(self, folder, build, log, jobs):
        self.folder, self.build, self.log, self.jobs = folder, build, log, jobs

    def path(self, file):
        return os.path.join(self.folder, file)

    def read(self, file):
        with open(self.path(file), encoding="utf-8") as stream:
            return stream.read()

    def write(self, file, text):
        # In one step, so that an interrupt leaves no part of a file.
        path = self.path(file)
        with open(f"{path}.mutate", "w", encoding="utf-8") as stream:
            stream.write(text)
        shutil.copymode(path, stream.name)
        os.replace(stream.name, path)

    def run(self, *command, **environment):
        """Runs a command. Returns its exit code and output, and also writes both to the log."""
        result = subprocess.run(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        with open(self.log, "a", encoding="utf-8") as stream:
            stream.write(f"$ {' '.join(command)}\n{result.stdout}")
        return result.returncode, result.stdout

    def compiles(self, targets):
        return self.run("cmake", "--build", self.build, "-j", str(self.jobs), "--target", *targets)[0] == 0

    def failing(self, tests, cases):
        """Returns the names of the tests and cases that fail; None if no test was run."""
        command = [
            "timeout",
            "-k",
            "10",
            str(TIME_LIMIT_SECONDS),
            "ctest",
            "--test-dir",
            self.build,
            "--timeout",
            "120",
        ]
        options = ["--no-tests=error", "--output-on-failure", "-j", "2", "-R", tests]
        code, output = self.run(*command, *options, **({"GTEST_FILTER": cases} if cases else {}))
        names = re.findall(FAILED_TEST, output, re.M)
        if code != 0 and not names:
            return None if "No tests were found" in output else ["(time limit)"]
        return names + sorted(set(re.findall(FAILED_CASE, output, re.M)))


def prepared_tree(log, jobs):
    """Returns the tree in build/mutate with the files of HEAD. Unchanged files keep their times."""
    tree = Tree(os.path.join(ROOT, "build/mutate/tree"), os.path.join(ROOT, "build/mutate/build"), log, jobs)
    if os.path.exists(tree.path(".git")):
        head = subprocess.check_output(["git", "-C", ROOT, "rev-parse", "HEAD"], text=True).strip()
        subprocess.check_call(["git", "-C", tree.folder, "checkout", "-q", "--detach", "--force", head])
        subprocess.check_call(["git", "-C", tree.folder, "clean", "-qfd"])
    else:
        subprocess.check_call(["git", "-C", ROOT, "worktree", "prune"])
        subprocess.check_call(["git", "-C", ROOT, "worktree", "add", "-q", "--detach", tree.folder, "HEAD"])
    dependencies = tree.path(".deps")
    if not os.path.islink(dependencies):
        os.symlink(os.path.join(ROOT, ".deps"), dependencies)
    code, _ = tree.run("cmake", "-S", tree.folder, "-B", tree.build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release")
    if code != 0:
        sys.exit(f"mutate: cmake failed; see {log}")
    return tree


def check_without_bugs(tree, mutations):
    targets = sorted({target for mutation in mutations for target in mutation.targets})
    if not tree.compiles(targets):
        sys.exit(f"mutate: {' '.join(targets)}: do not build without a bug; see {tree.log}")
    for tests, cases in sorted({(mutation.tests, mutation.cases) for mutation in mutations}):
        failing = tree.failing(tests, cases)
        if failing is None or failing:
            sys.exit(
                f"mutate: tests '{tests}' without a bug: {failing or 'none found'}; expected all to pass; "
                f"see {tree.log}"
            )


def outcome(tree, mutation):
    """Runs the tests with one bug. Returns the outcome in one word, and the cases that caught the bug."""
    original = tree.read(mutation.file)
    tree.write(mutation.file, mutation.applied_to(original))
    try:
        if not tree.compiles(mutation.targets):
            return "UNCOMPILABLE", []
        failing = tree.failing(mutation.tests, mutation.cases)
        if failing is None:
            return "NO TEST", []
        return ("caught", failing) if failing else ("SURVIVED", [])
    finally:
        tree.write(mutation.file, original)


def selected(options, modules):
    mutations = {mutation.name: mutation for found in modules.values() for mutation in found}
    names = list(options.names)
    for module in options.module:
        if module not in modules:
            sys.exit(f"mutate: --module: unknown module '{module}'; expected one of {', '.join(modules)}")
        names += [mutation.name for mutation in modules[module]]
    for name in names:
        if name not in mutations:
            sys.exit(f"mutate: unknown bug '{name}'; see tests/mutations")
    return [mutations[name] for name in names or mutations]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of bugs; all by default")
    parser.add_argument("--module", action="append", default=[], help="the bugs of tests/mutations/MODULE.toml")
    parser.add_argument("--check", action="store_true", help="only check that every bug fits the code")
    parser.add_argument("--mutations", default=os.path.join(ROOT, "tests/mutations"), help="the folder of the tables")
    parser.add_argument("--tree", help="a checkout to change and change back, instead of build/mutate")
    parser.add_argument(
        "--build", help="the build folder of --tree; its targets and tests count as checked without bugs"
    )
    parser.add_argument("--table", help="append one tab-separated row per bug to this file")
    parser.add_argument("--jobs", type=int, default=int(os.environ.get("JOBS", "2")))
    options = parser.parse_args()
    if (options.tree is None) != (options.build is None):
        parser.error("--tree requires --build, and the reverse")
    mutations = selected(options, read(options.mutations))
    source = Tree(options.tree or ROOT, "", "", 1)
    stale = 0
    for mutation in mutations:
        try:
            mutation.applied_to(source.read(mutation.file))
        except (ValueError, OSError) as error:
            stale += 1
            print(f"mutate: {mutation.name}: {error}", file=sys.stderr)
    if stale:
        sys.exit(2)
    if options.check:
        print(f"{len(mutations)} bugs fit the code")
        return
    log = os.path.join(ROOT, "build/mutate/log")
    os.makedirs(os.path.dirname(log), exist_ok=True)
    open(log, "w").close()
    if options.tree:
        tree = Tree(options.tree, options.build, log, options.jobs)
    else:
        tree = prepared_tree(log, options.jobs)
        check_without_bugs(tree, mutations)
    num_caught = 0
    for mutation in sorted(mutations, key=lambda mutation: mutation.file):
        begin = time.monotonic()
        word, cases = outcome(tree, mutation)
        seconds = time.monotonic() - begin
        num_caught += word == "caught"
        shown = ", ".join(cases[:3]) + (f" and {len(cases) - 3} more" if len(cases) > 3 else "")
        print(f"{word:<13} {seconds:6.1f} s  {mutation.name}: {shown or mutation.bug}", flush=True)
        if options.table:
            with open(options.table, "a", encoding="utf-8") as stream:
                stream.write(f"{mutation.name}\t{mutation.file}\t{word}\t{seconds:.0f}\t{' '.join(cases)}\n")
    print(f"{num_caught} of {len(mutations)} bugs caught; what was built and run: {os.path.relpath(log, ROOT)}")
    sys.exit(0 if num_caught == len(mutations) else 1)


if __name__ == "__main__":
    main()
