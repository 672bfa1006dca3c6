"""Only base/env reads the environment. Each variable is a documented field there."""

import re

from source_tree import Finding, code_lines

GETENV = re.compile(r"\b(?:secure_)?getenv\b")
ALLOWED = ("lockstep/base/env.cc", "lockstep/base/env.h")


def check(tree):
    for path in tree.cpp("lockstep", "programs", "examples", "bench"):
        if path in ALLOWED:
            continue
        for number, line in code_lines(tree.text(path)):
            if GETENV.search(line):
                yield Finding(path, number, "getenv outside base/env: add a field there and use Env::this_process()")


SAMPLE = {
    "lockstep/base/env.cc": 'auto x = std::getenv("HOME");\n',
    "lockstep/job/a.cc": '// getenv is for base/env\nauto x = getenv("HOME"); @flag\nauto s = "getenv(x)";\n',
    "examples/01/main.cc": 'auto x = ::secure_getenv("HOME"); @flag\n',
}
