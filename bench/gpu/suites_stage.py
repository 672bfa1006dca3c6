"""Stage suites: the project's tests for GPUs, on the real device, or without one on the fake CUDA and NCCL."""

import dataclasses
import re

from machine import find_tool
from results import Failed, Refused
from stage import LATER, Row, last_words


@dataclasses.dataclass(frozen=True)
class Suite:
    """A test program and the tests of it that use the device of their rank."""

    name: str
    program: str
    tests: str
    needs_gpu: bool = True  # false: without a GPU they run on the CPU instead of on the fake
    seconds: float = 20


SUITES = [
    Suite("gpu", "conformance_gpu", "Gpu.*"),
    Suite("ddp_gpu", "conformance_ddp", "DdpGpu.*"),
    Suite("optim", "conformance_optim", "All/FusedAgainstTorch.*", needs_gpu=False),
    Suite("amp", "conformance_amp", "Amp.InfinityOnOneRank*:Amp.Skipped*:Amp.ClipNorm*:Amp.Several*:Amp.OneScaler*",
          needs_gpu=False, seconds=35),
    Suite("sync_batch_norm", "conformance_nn",
          "SyncBatchNorm.EqualsOneBatchNorm*:SyncBatchNorm.TakesInputs*:SyncBatchNorm.LowPrecision*:"
          "SyncBatchNorm.Affine*", needs_gpu=False),
    Suite("data_gpu", "conformance_data", "DataGpu.*"),
]  # fmt: skip
GRAPHS = Suite("graphs", "unit_cuda", "*RealGpu*")
FAKE_GRAPHS = Suite("graphs", "unit_cuda", "*FakeGpu*")


def count_tests(text, suite):
    """Returns how many tests ran. Raises Failed for none: a filter that matches nothing proves nothing."""
    passed = re.findall(r"\[  PASSED  \] (\d+) test", text)
    if not passed:
        raise Failed(f"{suite.name} printed no result: {last_words(text)}")
    tests, skipped = int(passed[-1]), len(re.findall(r"\[  SKIPPED \] .* ms\)", text))
    if tests <= 0:
        raise Failed(f"{suite.name}: no test ran")
    return {"tests": tests, "skipped": skipped}


def run_suite(context, suite, ranks, transport, gpus=1, options=(), wrapper=(), timeout=None, environment=None):
    """Runs a suite as a job. `gpus`: how many a fake host has."""
    words = [context.program("lockstep"), "run", "-n", ranks, "--bind", "none", "--transport", transport, *options]
    if ranks > 1 and "--share-gpus" not in words:
        words.append("--share-gpus")  # also if CUDA_VISIBLE_DEVICES names one GPU
    words.append("--")
    if context.device == "cpu":
        words += ["env", *context.fake_gpu(gpus)] if suite.needs_gpu else ["env", "LOCKSTEP_DEVICE=cpu"]
    words += [*wrapper, context.program(suite.program), f"--gtest_filter={suite.tests}"]
    if wrapper:
        environment = {**(environment or {}), "LOCKSTEP_TIMEOUT": "200"}  # a tool makes everything slower
    log = f"suite-{suite.name}-{transport}-{ranks}" + ("-wrapped" if wrapper else "")
    _, text = context.run(
        log, words, timeout=timeout or 4 * suite.seconds, env=context.environment(**(environment or {}))
    )
    return {"ranks": ranks, "transport": transport, **count_tests(text, suite)}


def run_graphs(context):
    if context.device == "cpu":
        words = ["env", *context.fake_gpu(1), context.program("unit_cuda"), f"--gtest_filter={FAKE_GRAPHS.tests}"]
        suite = FAKE_GRAPHS
    else:
        words, suite = [context.program("unit_cuda"), f"--gtest_filter={GRAPHS.tests}"], GRAPHS
    _, text = context.run("suite-graphs", words, timeout=120)
    found = count_tests(text, suite)
    if found["skipped"]:
        raise Failed("tests of graphs were skipped", **found)
    return found


def check_memory(context, tool):
    """Runs the shortest suites under compute-sanitizer."""
    if context.device == "cpu":
        raise Refused("compute-sanitizer: there is no GPU")
    context.require("compute-sanitizer")
    program = find_tool("compute-sanitizer")
    options = [program, "--tool", tool, "--error-exitcode", "9", "--target-processes", "application-only"]
    if tool == "memcheck":
        options += ["--report-api-errors", "no"]  # libtorch asks for things that a device may not have
    suite = dataclasses.replace(SUITES[0], tests="Gpu.AllReduce:Gpu.UnrootedCollectives")
    results = [run_suite(context, suite, 1, "auto", wrapper=options, timeout=240)]
    suite = dataclasses.replace(SUITES[1], tests="DdpGpu.TrainsAsOneRankWould:DdpGpu.AccumulatesUnderNoSync")
    results.append(run_suite(context, suite, 2, "auto", wrapper=options, timeout=240))
    return {"tool": tool, "runs": results}


def rows(context):
    for suite in SUITES:
        transport = "nccl" if context.device == "cuda" or suite.needs_gpu else "auto"
        yield Row(f"{suite.name}, 1 rank", suite.seconds, lambda s=suite, t=transport: run_suite(context, s, 1, t))
    yield Row("graphs", 40, lambda: run_graphs(context))
    for ranks in (2, 3):
        for suite in SUITES:
            yield Row(f"{suite.name}, {ranks} ranks through host memory", suite.seconds,
                      lambda s=suite, r=ranks: run_suite(context, s, r, "shm"))  # fmt: skip
    for tool in ("memcheck", "initcheck"):
        yield Row(f"compute-sanitizer {tool}", 60, lambda t=tool: check_memory(context, t), worth=LATER)
