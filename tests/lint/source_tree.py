"""The files that the rules check, and functions that read C++ without parsing it."""

import functools
import json
import os
import re
import subprocess
import tempfile
from typing import NamedTuple

FOLDERS = ("lockstep", "programs", "examples", "bench", "tests", "scripts", "cmake", "docs", "python", ".ci")


class Finding(NamedTuple):
    path: str
    line: int
    text: str
    warning: bool = False


class Build:
    """What a build folder consists of. `has_all_parts`: it was configured with every optional part (NCCL, MPI, ...), so
    that it has every test."""

    def __init__(self, folder, has_all_parts):
        self._folder = folder
        self.has_all_parts = has_all_parts

    @functools.cached_property
    def compiled_files(self):
        """Absolute paths."""
        with open(os.path.join(self._folder, "compile_commands.json")) as file:
            return {entry["file"] for entry in json.load(file)}

    @functools.cached_property
    def tests(self):
        """The names of the tests in CMake."""
        # In a folder of its own: even here ctest writes a log, which would replace that of a ctest that is running.
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "CTestTestfile.cmake"), "w", encoding="utf-8") as file:
                file.write(f'subdirs("{os.path.abspath(self._folder)}")\n')
            tests = self._output("ctest", "--test-dir", folder, "--show-only=json-v1")
        return {test["name"] for test in json.loads(tests)["tests"]}

    @functools.cached_property
    def targets(self):
        return set(re.findall(r"^(\S+): ", self._output("ninja", "-C", self._folder, "-t", "targets", "all"), re.M))

    @staticmethod
    def _output(*command):
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


class Tree:
    """Maps paths to texts. Paths are relative to the root of the repository, with forward slashes. `build` is None if
    only the sources are checked."""

    def __init__(self, files, build=None):
        self._files = files
        self.build = build

    @classmethod
    def of_repository(cls, root, build=None):
        files = {}
        for folder in FOLDERS:
            for where, folders, names in os.walk(os.path.join(root, folder)):
                folders[:] = [name for name in folders if name != "__pycache__"]
                for name in names:
                    cls._read(files, root, os.path.join(where, name))
        for name in os.listdir(root):
            path = os.path.join(root, name)
            if os.path.isfile(path):
                cls._read(files, root, path)
        return cls(files, build)

    @staticmethod
    def _read(files, root, path):
        with open(path, "rb") as file:
            data = file.read()
        if b"\0" not in data:
            files[os.path.relpath(path, root)] = data.decode("utf-8", errors="replace")

    def paths(self, *folders, ends=()):
        """Yields the sorted paths below `folders` (default: all) with one of the endings."""
        for path in sorted(self._files):
            if folders and path.split("/")[0] not in folders:
                continue
            if not ends or path.endswith(tuple(ends)):
                yield path

    def cpp(self, *folders):
        return self.paths(*folders, ends=(".h", ".cc"))

    def text(self, path):
        return self._files[path]

    def lines(self, path):
        return self._files[path].splitlines()

    def __contains__(self, path):
        return path in self._files


_NOT_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<delimiter>[^(\s]*)\(.*?\)(?P=delimiter)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'',
    re.S,
)


def without_comments_and_strings(text):
    """Returns the text with comments removed and literals emptied, and with the same lines."""

    def blank(match):
        found = match.group()
        kept = "\n" * found.count("\n")
        return kept if found.startswith("/") else '""' + kept

    return _NOT_CODE.sub(blank, re.sub(r"(?<=[0-9a-fA-F])'(?=[0-9a-fA-F])", "", text))


def code_lines(text):
    """Yields pairs of line number and line, without comments and strings."""
    return enumerate(without_comments_and_strings(text).split("\n"), start=1)


INCLUDE = re.compile(r'^\s*#\s*include\s*(?P<open>[<"])(?P<file>[^>"]+)[>"]')


def includes(text):
    """Yields triples of line number, included file, and whether the file is in quotes."""
    for number, line in enumerate(text.splitlines(), start=1):
        match = INCLUDE.match(line)
        if match:
            yield number, match.group("file"), match.group("open") == '"'
