"""The layout of C++ is clang-format's, and that of Python is ruff's, which lints it as well; run `make format`."""

import os
import re
import subprocess
import tempfile

from source_tree import Finding

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../.."))
TOOLS = os.path.join(ROOT, ".deps/lint/bin")
CONFIGURATION = (".clang-format", "ruff.toml")


def check(tree):
    cpp = list(tree.paths(ends=(".h", ".cc", ".c")))
    python = list(tree.paths(ends=(".py",)))
    with tempfile.TemporaryDirectory() as folder:
        for path in [*cpp, *python]:
            write(os.path.join(folder, path), tree.text(path))
        for name in CONFIGURATION:
            with open(os.path.join(ROOT, name), encoding="utf-8") as file:
                write(os.path.join(folder, name), file.read())
        yield from clang_format(folder, cpp)
        if python:
            yield from ruff(folder)


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def run(folder, tool, *arguments):
    """Returns what the pinned `tool` prints about the files in `folder`."""
    program = os.path.join(TOOLS, tool)
    if not os.path.exists(program):
        raise SystemExit(f"lint: {program} does not exist; scripts/setup.sh installs it")
    result = subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True)
    return result.stdout + result.stderr


def clang_format(folder, paths):
    first_lines = {}
    for begin in range(0, len(paths), 200):
        output = run(folder, "clang-format", "--dry-run", "--ferror-limit=1", *paths[begin : begin + 200])
        for match in re.finditer(r"^(?P<path>[^\s:]+):(?P<line>\d+):\d+: warning: code should be", output, re.M):
            first_lines.setdefault(match["path"], int(match["line"]))
    for path, line in first_lines.items():
        yield Finding(path, line, "differs from .clang-format; run make format")


def ruff(folder):
    for command in (("format", "--check"), ("check",)):
        output = run(folder, "ruff", *command, "--no-cache", "--output-format=concise", ".")
        for match in re.finditer(r"^(?P<path>[^\s:]+):(?P<line>\d+):\d+: (?P<text>.+)$", output, re.M):
            yield Finding(match["path"], int(match["line"]), match["text"])


SAMPLE = {
    "lockstep/base/a.cc": "int a;\nint  b; @flag\n",
    "lockstep/base/b.cc": "int twice(int x) { return 2 * x; }\n",
    "tests/a.py": "x = 'single' @flag\n",
    "tests/b.py": "import os @flag\n",
    "tests/c.py": "x = 1\n",
}
