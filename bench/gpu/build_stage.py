"""Stage build: all of Lockstep and the suites for GPUs, with what collect.py has collected."""

import shutil
import time

from machine import ROOT
from results import Failed, Refused
from stage import LAST, Row

# The worth of a proof that ends early: the programs first, then the suites in the order in which they run.
PROGRAMS = ["lockstep_program", "bench_gpu_step", "bench_gpu_data_parallel", "lockstep_count_synchronizations"]
SUITES = [
    "conformance_gpu",
    "conformance_ddp",
    "conformance_optim",
    "conformance_amp",
    "conformance_nn",
    "conformance_data",
    "unit_cuda",
    "procs_gpu_fault_probe",
]
IMAGES = ["04_imagenet", "bench_make_images"]
FAKES = ["lockstep_test_fake_gpu"]  # only without a GPU


def _configure(context):
    if not shutil.which("cmake"):
        raise Refused("cmake is not installed")
    if (context.build / "CMakeCache.txt").exists():
        return {"kept": True}  # of an earlier call, or the user's own
    words = ["cmake", "-S", ROOT, "-B", context.build, "-DCMAKE_BUILD_TYPE=Release", "-DLOCKSTEP_UNITY=ON"]
    words += ["-G", "Ninja"] if shutil.which("ninja") else []
    if context.deps:
        words.append(f"-DLOCKSTEP_DEPS={context.deps}")
    _, text = context.run("configure", words, timeout=120)
    found = [part[3:] for part in text.splitlines() if part.startswith("-- libtorch ")]
    return {"libtorch": found[0] if found else None}


def _build_python(context):
    _, targets = context.run("targets", ["cmake", "--build", context.build, "--target", "help"], timeout=60)
    if "lockstep_python" not in targets:
        raise Refused("CMake found no Python with this torch and its headers")
    return _build(context, ["lockstep_python"])


def _build(context, targets):
    begin = time.monotonic()
    words = ["cmake", "--build", context.build, "-j", context.jobs, "--target", *targets]
    context.run("build-" + targets[0], words, timeout=600)
    missing = [name for name in targets if name != "all" and not list(context.build.rglob(_file_of(name)))]
    if missing:
        raise Failed(f"not built: {missing}")
    return {"build_seconds": round(time.monotonic() - begin, 1), "jobs": context.jobs, "targets": targets}


def _file_of(target):
    libraries = {
        "lockstep_count_synchronizations": "libcount_synchronizations.so",
        "lockstep_test_fake_gpu": "libfake_gpu.so",
        "lockstep_python": "_C.*.so",
    }
    return {"lockstep_program": "lockstep", **libraries}.get(target, target)


def rows(context):
    """Binaries do not travel: these rows run in every call, and build what is missing on this machine."""
    yield Row("configure", 20, lambda: _configure(context), repeat=True)
    suites = SUITES if context.device == "cuda" else SUITES + FAKES
    yield Row("programs", 60, lambda: _build(context, PROGRAMS), repeat=True)
    yield Row("suites", 60, lambda: _build(context, suites), repeat=True)
    yield Row("python", 60, lambda: _build_python(context), repeat=True)
    yield Row("images", 30, lambda: _build(context, IMAGES), repeat=True)
    if not context.tiny:
        yield Row("everything", 60, lambda: _build(context, ["all"]), worth=LAST)
