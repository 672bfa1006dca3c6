"""No line of a source is longer than 120 columns, except lines that end in an address, which cannot be split."""

import re

from source_tree import Finding

MAX_COLUMNS = 120
ENDS = (".h", ".cc", ".c", ".py", ".cmake", ".cmake.in", "CMakeLists.txt", ".sh", "Makefile", ".ci/run")
ADDRESS = re.compile(r"\bhttps?://\S{40,}")


def check(tree):
    for path in tree.paths(ends=ENDS):
        for number, line in enumerate(tree.lines(path), start=1):
            if len(line) > MAX_COLUMNS and not ADDRESS.search(line):
                yield Finding(path, number, f"{len(line)} columns; expected at most {MAX_COLUMNS}")


FULL = "x" * (MAX_COLUMNS - 3)
SAMPLE = {
    "lockstep/base/a.cc": f"// {FULL}\n// {FULL}x @flag\n// https://example.org/{FULL}\n",
    "tests/a.py": f"# {FULL}x\n# {FULL}xx @flag\n",
    "tests/CMakeLists.txt": f"#  {FULL}x @flag\n",
    "tests/a.sh": f"#  {FULL}x @flag\n",
    "Makefile": f"#  {FULL}x @flag\n# {FULL}x\n",
    "docs/a.md": f"   {FULL}x\n",
}
