#!/usr/bin/env python3
"""Runs a GoogleTest program: all cases in one process, but for those that need a process of their own.

run_gtest.py [--isolate PATTERN]... [--folder DIR] [--jobs N] [--case-seconds S] [--results FILE] PROGRAM [ARGUMENT...]

A case that does not end in S seconds is killed and fails; after a crash the cases behind it run in a new process. A
case fails that leaves a process behind. GTEST_FILTER selects cases, as everywhere, and --folder those whose source lies
in DIR. Prints what fails or is skipped, writes FILE (JSON: case -> passed, failed or skipped, and seconds), and exits
with 1 when a case failed, and with 2 when there was none."""

import argparse
import concurrent.futures
import fnmatch
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import xml.etree.ElementTree

MARK = "LOCKSTEP_TEST_CASE"
BEGIN = re.compile(r"^\[ RUN      \] (\S+)$")
END = re.compile(r"^\[\s+(OK|FAILED|SKIPPED)\s+\] (\S+?),? .*\((\d+) ms\)$")
LEFT_BEHIND_SECONDS = 2.0


class Runner:
    def __init__(self, options):
        self.command = [options.program, *options.arguments]
        self.limit = options.case_seconds
        self.outcomes = {}  # case -> (passed | failed | skipped, seconds)
        self.texts = {}  # case -> what it printed, of those that failed

    def cases(self, folder):
        """Yields the names of the cases in `folder` that GTEST_FILTER selects, including disabled cases."""
        with tempfile.TemporaryDirectory() as temporary:
            listing = os.path.join(temporary, "cases.xml")
            subprocess.run(
                [*self.command, "--gtest_list_tests", f"--gtest_output=xml:{listing}"],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            root = xml.etree.ElementTree.parse(listing).getroot()
        for suite in root.iter("testsuite"):
            for case in suite.iter("testcase"):
                if not folder or f"/{folder}/" in case.get("file"):
                    yield f"{suite.get('name')}.{case.get('name')}"

    def run(self, cases):
        """Runs `cases` in one process. If a case ends it, runs the cases after that one in a new process."""
        while cases:
            done = self.run_process(cases)
            cases = [case for case in cases if case not in done]

    def run_process(self, cases):
        """Runs one process. Returns the cases that it ran: all of them, or those up to one that ended the process."""
        mark = uuid.uuid4().hex
        process = subprocess.Popen(
            [*self.command, f"--gtest_filter={':'.join(cases)}", "--gtest_brief=0", "--gtest_color=no"],
            env={**os.environ, MARK: mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        done = self.follow(process)
        code = process.wait()
        running = next((case for case in cases if case not in done), None)
        left = leftovers(mark)
        if running is None and (left or code not in (0, 1)):
            running = cases[-1]  # the program failed after its last case, so report that with this case
        if running is not None:
            why = f"processes were left behind: {', '.join(left)}" if left else f"the process ended with code {code}"
            if running not in self.outcomes or self.outcomes[running][0] != "failed":
                self.fail(running, why)
            done.add(running)
        return done

    def follow(self, process):
        """Reads the output until it ends, or kills a case at its time limit. Returns the cases that have ended."""
        done, case, text, began = set(), None, [], time.monotonic()
        rest = b""
        while True:
            wait = self.limit - (time.monotonic() - began) if case else self.limit
            if wait <= 0 or not select.select([process.stdout], [], [], wait)[0]:
                os.killpg(process.pid, signal.SIGKILL)
                if case:
                    self.texts[case] = "".join(text)
                    self.fail(case, f"it did not end within {self.limit:.0f} s")
                    done.add(case)
                return done
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                if case:
                    self.texts[case] = "".join(text)
                return done
            *lines, rest = (rest + chunk).split(b"\n")
            for raw in lines:
                line = raw.decode(errors="replace")
                text.append(line + "\n")
                if match := BEGIN.match(line):
                    case, text, began = match[1], [], time.monotonic()
                elif (match := END.match(line)) and match[2] == case:
                    self.outcomes[case] = ({"OK": "passed"}.get(match[1], match[1].lower()), int(match[3]) / 1000)
                    if match[1] == "FAILED":
                        self.texts[case] = "".join(text)
                    done.add(case)
                    case, text = None, []

    def fail(self, case, why):
        self.outcomes[case] = ("failed", self.outcomes.get(case, ("", 0))[1])
        self.texts[case] = self.texts.get(case, "") + f"{case}: {why}\n"


def leftovers(mark):
    """Kills the processes that a case started and left, after 2 s in which they may end by themselves. Returns them."""
    deadline = time.monotonic() + LEFT_BEHIND_SECONDS
    while found := marked(mark):
        if time.monotonic() >= deadline:
            for pid, _ in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            return [f"{pid} ({name})" for pid, name in found]
        time.sleep(0.02)
    return []


def marked(mark):
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if f"{MARK}={mark}".encode() not in file.read():
                    continue
            with open(f"/proc/{name}/comm", encoding="utf-8") as file:
                found.append((int(name), file.read().strip()))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isolate", action="append", default=[], help="cases that run in a process each")
    parser.add_argument(
        "--folder",
        default=os.environ.get("LOCKSTEP_TEST_FOLDER", ""),
        help="only cases whose source lies in it; LOCKSTEP_TEST_FOLDER by default",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--case-seconds", type=float, default=60)
    parser.add_argument("--results", help="the JSON file that is written")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    runner = Runner(options)
    begin = time.monotonic()
    cases = list(runner.cases(options.folder))
    disabled = [case for case in cases if "DISABLED_" in case]
    cases = [case for case in cases if case not in disabled]
    runner.outcomes = {case: ("skipped", 0) for case in disabled}
    alone = [case for case in cases if any(fnmatch.fnmatchcase(case, pattern) for pattern in options.isolate)]
    together = [case for case in cases if case not in alone]
    batches = ([together] if together else []) + [[case] for case in alone]
    with concurrent.futures.ThreadPoolExecutor(max_workers=options.jobs) as pool:
        for future in [pool.submit(runner.run, batch) for batch in batches]:
            future.result()
    if options.results:
        os.makedirs(os.path.dirname(os.path.abspath(options.results)), exist_ok=True)
        with open(options.results, "w", encoding="utf-8") as file:
            json.dump({case: list(outcome) for case, outcome in sorted(runner.outcomes.items())}, file, indent=1)
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case, (outcome, _) in sorted(runner.outcomes.items()):
        counts[outcome] += 1
        if outcome == "failed":
            print(runner.texts.get(case, ""), end="")
        if outcome != "passed":
            print(f"[ {outcome.upper():^8} ] {case}")
    print(
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped "
        f"in {time.monotonic() - begin:.1f} s"
    )
    sys.exit(2 if not runner.outcomes else 1 if counts["failed"] else 0)


if __name__ == "__main__":
    main()
