"""Stage ranks: several ranks on one GPU over a real NCCL, which version 2.30 and later support."""

import ctypes
import json
import re

from results import Failed, Refused
from stage import Row, last_words
from step_stage import APART, differences
from suites_stage import SUITES, run_suite

LEAST_NCCL = (2, 30)


def version_of(library):
    """Returns the version that ncclGetVersion() of a library reports, as a tuple."""
    number = ctypes.c_int()
    if ctypes.CDLL(str(library)).ncclGetVersion(ctypes.byref(number)) != 0:
        raise Refused(f"ncclGetVersion() of {library} failed")
    return (number.value // 10000, number.value % 10000 // 100, number.value % 100)


def environment_of(context):
    """Returns the environment of ranks that share a GPU over NCCL, or raises Refused."""
    if context.device == "cpu":
        return {"FAKE_NCCL_VERSION": "23001"}
    if not context.nccl:
        raise Refused("no NCCL of 2.30 or later: --nccl names none, and libtorch brings an older one")
    version = version_of(context.nccl)
    if version[:2] < LEAST_NCCL:
        raise Refused(f"{context.nccl} is NCCL {'.'.join(map(str, version))}; expected 2.30 or later")
    return {"LD_PRELOAD": str(context.nccl)}


def conformance(context, suite, ranks):
    environment = environment_of(context)
    result = run_suite(context, suite, ranks, "nccl", gpus=1, options=["--share-gpus"], environment=environment)
    if context.device == "cuda":
        log = context.logs / f"suite-{suite.name}-nccl-{ranks}.log"
        versions = re.findall(r"NCCL (\d+\.\d+\.\d+)", log.read_text(errors="replace"))
        if not versions or any(tuple(map(int, one.split(".")))[:2] < LEAST_NCCL for one in versions):
            raise Failed(f"ranks use NCCL {versions}", **result)
        result["nccl"] = versions[0]
    return result


def losses_of(context, log, launch, environment=None, trace=()):
    """Returns the losses of the first steps of a small GPT, as means over the ranks, and the transport. `trace`: a file
    for a profile of one more step."""
    size, batch = ("tiny", 4) if context.tiny else ("full", 4)
    words = [*launch, context.program("bench_gpu_step"), "lockstep-fused", "gpt", size, context.device]
    words += [context.threads, "32", batch, 4, *trace]
    _, text = context.run(log, words, timeout=90, env=context.environment(**(environment or {})))
    lines = [line[line.index("{") :] for line in text.splitlines() if "{" in line]  # each line begins with "[0] "
    if not lines:
        raise Failed(f"no result: {last_words(text)}")
    return json.loads(lines[-1])


def launch_two(context, transport):
    """Returns the command and the environment of two ranks that share a GPU."""
    if transport == "nccl" and context.device == "cpu":
        raise Refused("a fake GPU has no kernels for this model")
    words = [context.program("lockstep"), "run", "-n", 2, "--bind", "none", "--share-gpus", "--transport", transport]
    return [*words, "--"], environment_of(context) if transport == "nccl" else {}


def compare_losses(context, transport):
    launch, environment = launch_two(context, transport)
    alone = losses_of(context, "losses-1", [])
    both = losses_of(context, f"losses-2-{transport}", launch, environment)
    apart = max(differences(both["losses"], alone["losses"]))
    result = {"alone": alone["losses"], "both": both["losses"], "apart": apart, "transport": both["transport"]}
    if apart > APART["32"][1]:
        raise Failed("the losses of two ranks differ from those of one", **result)
    return result


def union(intervals):
    """Returns disjoint intervals, in order, that cover the same times."""
    found = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return found


def common_time(first, second):
    """Returns how long two lists of disjoint intervals overlap."""
    return sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)


def trace_overlap(context):
    """Shows in a profile of a step that gradients move while backward() still computes others."""
    launch, environment = launch_two(context, "nccl")
    path = context.logs / "trace-nccl.json"
    losses_of(context, "trace-nccl", launch, environment, [path])
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    if not events:
        raise Failed("the profile has no events")
    moving, computing = [], []
    for event in events:
        interval = (event["ts"], event["ts"] + event["dur"])
        if event.get("cat") == "kernel":
            (moving if event["name"].startswith("nccl") else computing).append(interval)
    moving, computing = union(moving), union(computing)
    total = sum(end - begin for begin, end in moving)
    share = common_time(moving, computing) / total if total else 0
    result = {"moving_us": round(total, 1), "share_while_computing": round(share, 3)}
    if share == 0 and not context.tiny:  # a tiny model has only one bucket
        raise Failed("no gradient moves while others are computed", **result)
    return result


def unless_hung(hung, name, run):
    """Runs a row over NCCL. After one that hung, the others are refused: each would cost its whole limit."""
    if hung:
        raise Refused(f"the row {hung[0]} did not end")
    try:
        return run()
    except Failed as why:
        if str(why).startswith("no end within"):
            hung.append(name)
        raise


def rows(context):
    hung = []

    def over_nccl(name, seconds, run):
        return Row(name, seconds, lambda: unless_hung(hung, name, run))

    yield Row("losses of 2 ranks through host memory", 40, lambda: compare_losses(context, "shm"))
    yield over_nccl("losses of 2 ranks over NCCL", 40, lambda: compare_losses(context, "nccl"))
    yield over_nccl("overlap of 2 ranks over NCCL", 30, lambda: trace_overlap(context))
    for ranks in (2, 4):
        for suite in SUITES[:2]:
            name = f"{suite.name}, {ranks} ranks over NCCL"
            yield over_nccl(name, suite.seconds, lambda s=suite, r=ranks: conformance(context, s, r))
