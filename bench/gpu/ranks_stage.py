"""Stage ranks: several ranks on one GPU over a real NCCL, which version 2.30 and later support."""

import ctypes
import dataclasses
import re

from results import Failed, Refused
from stage import Row
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


def rows(context):
    for ranks in (2, 4):
        for suite in SUITES[:2]:
            yield Row(f"{suite.name}, {ranks} ranks over NCCL", suite.seconds,
                      lambda s=suite, r=ranks: conformance(context, dataclasses.replace(s, tests=s.tests), r))  # fmt: skip
