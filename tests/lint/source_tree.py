"""The files that the rules check, and functions that read C++ without parsing it."""

import os
import re
from typing import NamedTuple

FOLDERS = ("lockstep", "programs", "examples", "bench", "tests", "scripts", "cmake", "docs", ".ci")


class Finding(NamedTuple):
    path: str
    line: int
    text: str
    warning: bool = False


class Tree:
    """Maps paths to texts. Paths are relative to the root of the repository, with forward slashes."""

    def __init__(self, files):
        self._files = files

    @classmethod
    def of_repository(cls, root):
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
        return cls(files)

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
