"""Stage torch: Python programs on the GPU: over the backend "lockstep", over the package lockstep, and unchanged ones
over NCCL that lockstep run watches. Ranks that share the GPU need NCCL of 2.30 or later."""

import json
import os
import re
import statistics
import sys

from machine import ROOT
from ranks_stage import environment_of
from results import Failed, Refused
from stage import LATER, Row, last_words

HERE = ROOT / "bench/gpu"
TRAININGS = ("ddp", "fsdp", "checkpoint", "groups", "own", "own-fused", "own-amp")
APART = {"own-amp": 1e-2}  # the largest difference of a loss from that without ranks; else 1e-4
WITHOUT_PACKAGE = ("steps", "capture")
FAILURES = {"desync": "DESYNC", "absent": "RANK_STUCK"}
HANGS = ("barrier", "backward", "loop", "stop")
TURNS = 3


def rank_environment(context, ranks, more=()):
    """Returns the environment of a job of Python ranks."""
    if not context.python:
        raise Refused("there is no Python with torch")
    environment = dict(more)
    if context.device == "cuda" and ranks > 1:
        environment.update(environment_of(context))
    path = (str(context.build / "python"), os.environ.get("PYTHONPATH"))
    return context.environment(**environment, PYTHONPATH=os.pathsep.join(filter(None, path)))


def command(context, ranks, mode, options=(), more=()):
    """Returns the words and the environment of a job that runs torch_script.py."""
    environment = rank_environment(context, ranks, more)
    if mode not in WITHOUT_PACKAGE and not list((context.build / "python/lockstep").glob("_C.*")):
        raise Refused("the Python package has not been built: CMake found no Python with torch and its headers")
    if context.device == "cuda" and ranks > 1:
        options = [*options, "--share-gpus"]
    start = [context.program("lockstep"), "run", "-n", ranks, "--bind", "none", *options, "--", context.python]
    return [*start, HERE / "torch_script.py", mode, context.device], environment


def answer_of(context, log, ranks, mode, **how):
    """Runs a job and returns what rank 0 prints as JSON."""
    words, environment = command(context, ranks, mode, **how)
    _, text = context.run(log, words, timeout=120, env=environment)
    found = re.search(r"^(?:\[0\] )?(\{.*\})$", text, re.MULTILINE)
    if not found:
        raise Failed(f"no result: {last_words(text)}")
    return json.loads(found[1])


def train(context, mode, ranks):
    answer = answer_of(context, f"torch-{mode}-{ranks}", ranks, mode)
    answer["apart"] = max(abs(one - two) for one, two in zip(answer["losses"], answer["alone"], strict=True))
    if not answer["apart"] <= APART.get(mode, 1e-4) or not answer.get("same", True):
        raise Failed("the training differs from that without ranks", **answer)
    return answer


def check_failure(context, mode):
    """The error of a backend's operation on the device ends the job, with the rank named."""
    options = ["--hang-timeout", "5"]
    words, environment = command(context, 2, mode, options=options)
    code, text = context.run(f"torch-{mode}", words, timeout=60, env=environment, check=False)
    fatal = re.search(r"^FATAL .*$", text, re.MULTILINE)
    cause = re.search(r"cause=(\w+) .*rank=(\d+)", fatal[0]) if fatal else None
    if code == 0 or not cause or cause[1] != FAILURES[mode] or (mode == "absent" and cause[2] != "1"):
        raise Failed(f"exit code {code}: {fatal[0] if fatal else last_words(text)}")
    return {"fatal": fatal[0], "exit_code": code}


def check_hang(context, what, ranks):
    """tests/procs/watch, over NCCL."""
    hook = context.program("lockstep").parents[1] / "lib/lockstep/_lockstep_hook"
    words = [sys.executable, ROOT / "tests/procs/watch/watch.py", "--lockstep", context.program("lockstep")]
    words += ["--hook", hook, "--python", context.python, "--device", context.device, "--ranks", ranks, "--only", what]
    _, text = context.run(f"watch-{what}-{ranks}", words, timeout=60, env=rank_environment(context, ranks))
    ended = re.search(r"ended ([\d.]+) s later", text)
    return {"fatal": re.search(r"FATAL .*", text)[0], "seconds_after_the_fault": float(ended[1])}


def check_graph(context, ranks):
    """A job that replays a graph is not taken for one that hangs."""
    if context.device == "cpu":
        raise Refused("CUDA graphs: there is no GPU")
    return answer_of(context, f"watch-graph-{ranks}", ranks, "capture", options=["--hang-timeout", "5"])


def measure_watch(context):
    """What the watch costs a step of 6 million parameters, in turns."""
    times = {"on": [], "off": []}
    for turn in range(1 if context.tiny else TURNS):
        for watch in ("on", "off") if turn % 2 else ("off", "on"):
            more = {"LOCKSTEP_WATCH": "off"} if watch == "off" else {}
            times[watch].append(answer_of(context, f"watch-steps-{watch}", 1, "steps", more=more)["ms"])
    ratios = [one / two for one, two in zip(times["on"], times["off"], strict=True)]
    return {"ms": times, "ratio": round(statistics.median(ratios), 4)}


def rows(context):
    for mode in TRAININGS:
        yield Row(f"{mode}, 2 ranks", 25, lambda m=mode: train(context, m, 2))
    for mode in FAILURES:
        yield Row(f"{mode}, 2 ranks", 25, lambda m=mode: check_failure(context, m))
    for what in HANGS if not context.tiny else HANGS[:1]:
        yield Row(f"unchanged script, {what}, 2 ranks", 25, lambda w=what: check_hang(context, w, 2))
    yield Row("CUDA graph under the watch, 2 ranks", 40, lambda: check_graph(context, 2))
    for mode in TRAININGS if context.device == "cuda" else ():
        yield Row(f"{mode}, 1 rank", 25, lambda m=mode: train(context, m, 1), worth=LATER)
    yield Row("cost of the watch", 60, lambda: measure_watch(context), worth=LATER)
