"""Names of files and folders are snake_case and describe the content."""

import re

from source_tree import Finding

SAYS_NOTHING = re.compile(r"(?:^|/)(?:utils?|common|misc|helpers?)(?:[./]|$)")
SNAKE_CASE = re.compile(r"^[a-z0-9_]+$")


def check(tree):
    for path in tree.paths():
        if SAYS_NOTHING.search(path):
            yield Finding(path, 1, "a meaningless name; do not use utils, common, misc and helpers")
        stem, _, ending = path.rsplit("/", 1)[-1].rpartition(".")
        if ending in ("h", "cc", "py", "sh") and not SNAKE_CASE.match(stem):
            yield Finding(path, 1, "the name of a file must be snake_case")


SAMPLE = {
    "lockstep/base/utils.h": "x @flag\n",
    "lockstep/helpers/x.h": "x @flag\n",
    "lockstep/base/common_cause.h": "x\n",
    "lockstep/base/BadName.cc": "x @flag\n",
    "CMakeLists.txt": "x\n",
}
