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


def losses_of(context, log, launch, environment=None):
    """Returns the losses of the first steps of a small GPT, as means over the ranks, and the transport."""
    size, batch = ("tiny", 4) if context.tiny else ("full", 4)
    words = [*launch, context.program("bench_gpu_step"), "lockstep-fused", "gpt", size, context.device]
    words += [context.threads, "32", batch, 4]
    _, text = context.run(log, words, timeout=180, env=context.environment(**(environment or {})))
    lines = [line[line.index("{") :] for line in text.splitlines() if "{" in line]  # each line begins with "[0] "
    if not lines:
        raise Failed(f"no result: {last_words(text)}")
    return json.loads(lines[-1])


def compare_losses(context, transport):
    environment = environment_of(context) if transport == "nccl" else {}
    if transport == "nccl" and context.device == "cpu":
        raise Refused("a fake GPU has no kernels for this model")
    launch = [context.program("lockstep"), "run", "-n", 2, "--bind", "none", "--share-gpus", "--transport", transport]
    alone = losses_of(context, "losses-1", [])
    both = losses_of(context, f"losses-2-{transport}", [*launch, "--"], environment)
    apart = max(differences(both["losses"], alone["losses"]))
    result = {"alone": alone["losses"], "both": both["losses"], "apart": apart, "transport": both["transport"]}
    if apart > APART["32"][1]:
        raise Failed("the losses of two ranks differ from those of one", **result)
    return result


def rows(context):
    yield Row("losses of 2 ranks through host memory", 40, lambda: compare_losses(context, "shm"))
    yield Row("losses of 2 ranks over NCCL", 40, lambda: compare_losses(context, "nccl"))
    for ranks in (2, 4):
        for suite in SUITES[:2]:
            name = f"{suite.name}, {ranks} ranks over NCCL"
            yield Row(name, suite.seconds, lambda s=suite, r=ranks: conformance(context, s, r))
