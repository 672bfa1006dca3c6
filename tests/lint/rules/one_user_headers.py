"""Few headers of lockstep/ have only one user besides their own source and the tests: such a header is part of the file
that includes it. Counted; the bound only goes down."""

import os

from source_tree import Finding, includes

MOST = 74


def check(tree):
    one = sorted(header for header, users in users_of_headers(tree).items() if len(users) <= 1)
    if len(one) > MOST:
        yield Finding(one[0], 1, f"{len(one)} headers of lockstep/ have one user; expected at most {MOST}: {one}")
    elif len(one) < MOST and "lockstep/lockstep.h" in tree:
        yield Finding("tests/lint/rules/one_user_headers.py", 1, f"{len(one)} headers have one user: lower MOST")


def users_of_headers(tree):
    """Returns header -> the files that include it, without its own source and tests."""
    users = {path: set() for path in tree.paths("lockstep", ends=(".h",))}
    for path in tree.paths(ends=(".h", ".cc", ".c")):
        if path.startswith("tests/"):
            continue
        for _, name, _ in includes(tree.text(path)):
            for header in (name, "lockstep/" + name, os.path.join(os.path.dirname(path), name)):
                if header in users and path not in (header, header[:-2] + ".cc"):
                    users[header].add(path)
                    break
    return users


SAMPLE = {
    **{f"lockstep/base/f{number:03}.h": "int a;" + " @flag" * (number == 0) + "\n" for number in range(MOST + 1)},
    "lockstep/base/two.h": "int a;\n",
    "lockstep/base/a.cc": '#include "lockstep/base/two.h"\n#include "lockstep/base/f000.h"\n',
    "bench/b.cc": '#include "lockstep/base/two.h"\n',
    "tests/c.cc": '#include "lockstep/base/f001.h"\n',
}
