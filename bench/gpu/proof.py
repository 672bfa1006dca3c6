#!/usr/bin/env python3
"""Proves Lockstep on a GPU: builds it, runs its tests on the device, measures it beside PyTorch, and injects failures.

One command, for a machine where nothing can be installed and which may be lent for minutes only: rows run in the order
of their worth, each is written to OUT/results.jsonl when it is done, and --limit ends the run in good order. Call it
again with --resume to continue, also on another machine of the same kind. It needs neither git nor a network.

Exit codes: 0: every row of the stages has a result, and none failed; 1: the same, but rows failed; 3: the limit came
first: call it again with --resume.
"""

import argparse
import os
import pathlib
import re
import shutil
import sys
import tarfile
import time
import traceback

import build_stage
import data_stage
import dp_stage
import failures_stage
import machine
import memory_stage
import ranks_stage
import step_stage
import suites_stage
import torch_stage
from results import Failed, Refused, Results
from stage import FIRST, LAST, LATER, Context, OutOfTime

STAGES = {
    "build": build_stage,
    "suites": suites_stage,
    "step": step_stage,
    "memory": memory_stage,
    "ranks": ranks_stage,
    "failures": failures_stage,
    "data": data_stage,
    "dp": dp_stage,
    "torch": torch_stage,
}
UNFINISHED = 3


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of results.jsonl and logs.tar.gz")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--rows", type=re.compile, default="", help="only rows whose name this expression matches")
    parser.add_argument("--limit", type=float, default=540, help="seconds of this call (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="keep the rows in OUT that other calls made")
    parser.add_argument("--retry", action="store_true", help="with --resume, repeat rows that failed or were refused")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and few repetitions, to test this program")
    parser.add_argument("--carried", type=pathlib.Path, help="file made by collect.py, where nothing can be installed")
    parser.add_argument("--build", type=pathlib.Path, default=machine.ROOT / "build/gpu", help="build folder")
    parser.add_argument("--nccl", type=pathlib.Path, help="libnccl.so.2 of 2.30 or later (default: the carried one)")
    parser.add_argument("--python", default=sys.executable, help='interpreter with torch (default: this one; "": none)')
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at a time")
    args = parser.parse_args()
    args.stages = args.stages.split(",")
    for stage in args.stages:
        if stage not in STAGES:
            parser.error(f'--stages has "{stage}"; expected some of {",".join(STAGES)}')
    args.out.mkdir(parents=True, exist_ok=True)
    args.out, args.build = args.out.resolve(), args.build.resolve()
    if os.sep in args.python:
        args.python = os.path.abspath(args.python)  # not resolve(): a virtual environment is known by its link
    args.deps = None
    if args.carried:
        use_carried(args)
    return args


def use_carried(args):
    """Unpacks what collect.py has made, once."""
    folder = args.build / "carried"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with tarfile.open(args.carried) as archive:
            archive.extractall(folder, filter="data")
        (folder / "done").touch()
    args.deps, args.nccl = folder / "deps", args.nccl or folder / "libnccl.so.2"
    earlier = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{folder / 'python'}:{earlier}" if earlier else str(folder / "python")


def run_row(context, results, stage, row):
    """Runs a row and writes its result. Raises OutOfTime if the limit comes first."""
    begin = time.monotonic()
    try:
        outcome, more = "done", row.run()
    except Refused as why:
        outcome, more = "refused", {"why": str(why)}
    except Failed as why:
        outcome, more = "failed", {"why": str(why), **why.details}
    except OutOfTime:
        raise
    except Exception as error:  # a mistake in the proof itself must not end it
        outcome, more = "failed", {"why": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    seconds = round(time.monotonic() - begin, 2)
    results.append(stage, row.name, outcome, seconds=seconds, **more)
    print(
        f"{stage}: {row.name}: {outcome} ({seconds:.1f} s)" + (f": {more['why']}" if "why" in more else ""), flush=True
    )


def run_stages(args, context, results):
    """Returns whether every row has a result."""
    finished = True
    for worth in (FIRST, LATER, LAST):
        for name in args.stages:
            for row in STAGES[name].rows(context):
                if row.worth != worth or not re.search(args.rows, row.name):
                    continue
                if results.is_done(name, row.name, args.retry) and not row.repeat:
                    continue
                if context.remaining() < min(row.seconds, 0.9 * args.limit):
                    print(f"{name}: {row.name}: not started: {context.remaining():.0f} s are left", flush=True)
                    finished = False
                    continue
                try:
                    run_row(context, results, name, row)
                except OutOfTime:
                    print(f"{name}: {row.name}: the limit was reached", flush=True)
                    return False
    return finished


def pack_logs(context):
    """Writes all logs to one archive, which a later call replaces."""
    if context.logs.exists():
        with tarfile.open(context.out / "logs.tar.gz.part", "w:gz") as archive:
            archive.add(context.logs, "logs")
        os.replace(context.out / "logs.tar.gz.part", context.out / "logs.tar.gz")
        shutil.rmtree(context.logs)


def unpack_logs(context):
    """Restores the logs of earlier calls, which may have run on another machine."""
    archive = context.out / "logs.tar.gz"
    if archive.exists() and not context.logs.exists():
        context.logs.mkdir()
        with tarfile.open(archive) as file:
            for member in file:
                name = pathlib.PurePosixPath(member.name).name
                if member.isfile() and name not in ("", ".."):
                    (context.logs / name).write_bytes(file.extractfile(member).read())


def main():
    begin = time.monotonic()
    args = parse_arguments()
    head = {**machine.describe(args.python, args.device, args.tiny), "device": args.device}
    if args.device == "cuda" and not head["gpu"]:
        sys.exit("proof: --device is cuda, but PyTorch finds no GPU; --device cpu --tiny runs without one")
    head["lacks"] = machine.lacks(args.python, args.device, head, args.out / "results.jsonl" if args.resume else None)
    for name, why in head["lacks"].items():
        print(f"lacks {name}: {why}", flush=True)
    context = Context(args, head, begin)
    results = Results(args.out / "results.jsonl", head, args.resume)
    if args.resume:
        unpack_logs(context)
    try:
        finished = run_stages(args, context, results)
    finally:
        pack_logs(context)
    failed = [row for row in results.done.values() if row["outcome"] == "failed"]
    rest = "nothing is left to do" if finished else "call it again with --resume for the rest"
    print(f"{len(results.done)} rows, {len(failed)} failed; {rest}: {args.out / 'results.jsonl'}", flush=True)
    sys.exit(UNFINISHED if not finished else 1 if failed else 0)


main()
