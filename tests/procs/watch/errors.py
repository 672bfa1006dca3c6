#!/usr/bin/env python3
"""Tests the FATAL line for errors of Python programs: it quotes the exception and adds a remedy, and names no victim.

Usage: errors.py --lockstep PROGRAM --table docs/reference/error-texts.md [--python INTERPRETER] [--package DIR]
           [--runs N] [--all]
--runs repeats the case of a rank that ends after its victims. The exit code is 77 if there is no Python with torch.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import sys
import tempfile

from watch import check, fatal_of
from watch import run as run_program

PROGRAM = pathlib.Path(__file__).with_name("error_program.py")
# What really raises the error: the text of the exception, in the detail.
REAL = {
    "local_rank": (1, "train.py: error: unrecognized arguments: --local_rank=0"),
    "local_rank_required": (1, "the following arguments are required: --local_rank"),
    "no_module": (1, "ModuleNotFoundError: No module named 'numpy_of_another_world'"),
    "inplace": (1, "modified by an inplace operation"),
    "unused_parameter": (2, "Expected to have finished reduction in the prior iteration"),
    "not_initialized": (1, "Default process group has not been initialized"),
    "twice": (1, "initialize the default process group twice"),
    "address_in_use": (1, "address already in use"),
    "names_of_a_wrapper": (1, "Error(s) in loading state_dict for Linear"),
    "weights_only": (1, "Weights only load failed"),
}


def run(args, ranks, *words, env=()):
    with tempfile.TemporaryDirectory() as folder:
        _, output, _ = run_program(args, *words, program=PROGRAM, ranks=ranks, folder=folder, env=env)
    return fatal_of(output), output


def unquoted(text):
    return text[1:-1].replace('\\"', '"').replace("\\\\", "\\")


def rows_of(table):
    rows = re.findall(r"^\| `(.*)` \| (.*) \|$", pathlib.Path(table).read_text(), re.MULTILINE)
    return [(text, remedy) for text, remedy in rows if "never named" not in remedy]


def test_texts(args, pool, rows):
    """Each row of the table: quoted, with its remedy."""
    jobs = [(text, remedy, pool.submit(run, args, 1, "text", text)) for text, remedy in rows]
    for text, remedy, job in jobs:
        fatal, output = job.result()
        check(
            fatal.get("cause") == "RANK_EXITED"
            and unquoted(fatal["detail"]).startswith(f"exited with code 1: RuntimeError: {text}")
            and unquoted(fatal["hint"]) == remedy,
            f"{text}: {fatal or output}",
        )


def test_real_errors(args, pool, rows):
    jobs = {case: pool.submit(run, args, ranks, case) for case, (ranks, _) in REAL.items()}
    for case, job in jobs.items():
        fatal, output = job.result()
        detail, hint = unquoted(fatal.get("detail", '""')), unquoted(fatal.get("hint", '""'))
        check(REAL[case][1].lower() in detail.lower(), f"{case}: {detail or output}")
        check(hint in [remedy for _, remedy in rows], f"{case}: {hint}")


def test_forms(args, pool, rows):
    """In programs of torch.distributed over Gloo and over Lockstep and in those of the package alike."""
    forms = ("gloo", "lockstep", "package") if args.package else ("gloo",)
    shown = rows if args.all else rows[:: len(rows) // 2]
    cases = [("joined_text", f"RuntimeError: {text}", remedy, (text,)) for text, remedy in shown]
    cases.append(("chain", "LookupError: sample 1234 has no label; then RuntimeError: cannot close the file", None, ()))
    worker = "LookupError in DataLoader worker process 0. (LookupError: sample 1234 has no label)"
    cases.append(("worker", worker, None, ()))
    jobs = [
        (form, case, pool.submit(run, args, 2, case[0], form, *case[3], env={"PYTHONPATH": args.package}))
        for case in cases
        for form in forms
    ]
    for form, (_, expected, remedy, _), job in jobs:
        fatal, output = job.result()
        detail, hint = unquoted(fatal.get("detail", '""')), unquoted(fatal.get("hint", '""'))
        good = expected in detail and hint == (remedy or "the last lines of its stderr are above")
        no_memory = form != "gloo" and "can't allocate memory" in expected  # by its text, as torch has no type for it
        cause = "RESOURCE" if no_memory else "RANK_EXITED"
        check(good and fatal["cause"] == cause, f"{form}: {expected}: {fatal or output}")


def test_own_rows(args):
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("# mine\nlicence expired\task Eve\n")
        file.flush()
        fatal, output = run(args, 1, "text", "the licence expired", env={"LOCKSTEP_ERROR_HINTS": file.name})
        check(unquoted(fatal.get("hint", '""')) == "ask Eve", f"own rows: {output}")
    with tempfile.TemporaryDirectory() as folder:
        fifo = f"{folder}/fifo"
        os.mkfifo(fifo)
        for path in ("/nowhere", folder, fifo):
            fatal, _ = run(args, 1, "text", "x", env={"LOCKSTEP_ERROR_HINTS": path})
            check((fatal["cause"], fatal["rank"]) == ("BAD_ARG", "-"), f"no file: {path}: {fatal}")


def test_culprit(args, seconds):
    """The rank that fails first is named, although its victims end earlier."""
    fatal, output = run(args, 3, "culprit", *seconds)
    check(
        (fatal.get("cause"), fatal.get("rank")) == ("RANK_EXITED", "2")
        and "exited with code 1: ValueError: bad sample 4711" in fatal["detail"],
        f"culprit {seconds}: {fatal or output}",
    )


def test_early_end(args, source, *late):
    """Of two ranks that have ended, the one is named that another still needs."""
    fatal, output = run(args, 3, "early_end", source, *late)
    check(
        (fatal.get("cause"), fatal.get("rank")) == ("UNEVEN_INPUT", str(source))
        and "exited with code 0 while rank 1 still needed it" in fatal["detail"],
        f"early end of rank {source} {late}: {fatal or output}",
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True, type=os.path.abspath)
    parser.add_argument("--table", required=True)
    parser.add_argument("--python", default="")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--package", default="", help="folder of the Python package")
    parser.add_argument("--all", action="store_true", help="all texts in all kinds of programs, which takes minutes")
    args = parser.parse_args()
    if not args.python:
        print("skipped: no Python with torch (scripts/setup.sh installs one)")
        sys.exit(77)
    rows = rows_of(args.table)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        test_texts(args, pool, rows)
        test_real_errors(args, pool, rows)
        test_forms(args, pool, rows)
    test_own_rows(args)
    for _ in range(args.runs):
        test_culprit(args, [])
        test_culprit(args, ["1.5"])
        for source in 0, 2:
            test_early_end(args, source)
            test_early_end(args, source, "late")


if __name__ == "__main__":
    main()
