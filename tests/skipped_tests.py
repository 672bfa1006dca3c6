#!/usr/bin/env python3
"""Prints what the last tests did not run: skipped_tests.py LOG...

LOG is what ctest has printed. Prints one name a line: of tests that ctest skipped, and EXECUTABLE/CASE for cases of
executables, which tests/run_gtest.py writes to build/release/test-results/. With --sentence, all in one line.
"""

import json
import pathlib
import re
import sys

RESULTS = pathlib.Path(__file__).resolve().parents[1] / "build/release/test-results"


def skipped(logs):
    for log in logs:
        for line in pathlib.Path(log).read_text(encoding="utf-8", errors="replace").splitlines():
            if match := re.match(r"\s*\d+ - (\S+) \((?:Skipped|Disabled|Not Run)\)$", line):
                yield match.group(1)
    for path in sorted(RESULTS.glob("*.json")):
        for case, outcome in json.loads(path.read_text()).items():
            if outcome[0] == "skipped":
                yield f"{path.stem}/{case}"


def main():
    names = sorted(set(skipped(word for word in sys.argv[1:] if word != "--sentence")))
    if "--sentence" not in sys.argv:
        print(*names, sep="\n" if names else "", end="\n" if names else "")
    elif names:
        print(f"{len(names)} tests were not run; the output of each says why: {', '.join(names)}")


if __name__ == "__main__":
    main()
