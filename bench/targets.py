"""The performance targets of Lockstep on one host, and their comparison with the JSON lines of `lockstep bench`."""

import re

OWN, FUSED, DDP = "lockstep", "lockstep-fused", "pytorch-ddp"
# By model: the fused step and the step with torch's SGD, each relative to unsynchronised processes with tuned malloc,
# and PyTorch's DDP relative to the fused step.
STEPS = {
    "mlp-50m": (0.85, 1.22, 3.2),
    "mlp-65m": (0.83, 1.10, 2.2),
    "mlp-6m": (0.98, 1.10, 1.7),
    "transformer-2m": (0.98, 1.02, 1.15),
    "cnn-1m": (1.04, 1.06, 1.3),
}


def find(lines, impl, **wanted):
    """Returns the line of an implementation, or of its first version; None if it was not measured."""
    for line in lines:
        name = line.get("impl", "")
        if re.fullmatch(re.escape(impl) + r"([-.][\d.]+)?", name) and all(
            line.get(key) == value for key, value in wanted.items()
        ):
            return line
    return None


def times(lines, own, other, **wanted):
    """Returns the time of `other` relative to `own`, from their ratios to a common first implementation."""
    first, second = find(lines, own, **wanted), find(lines, other, **wanted)
    return second["ratio"] / first["ratio"] if first and second else None


def best_baseline(lines, own, **wanted):
    """Returns the time of the fastest baseline relative to `own`."""
    ratios = [
        times(lines, own, baseline, **wanted) for baseline in ("gloo", "openmpi-4", "openmpi-5", "mpich", "intel-mpi")
    ]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def inverse(value):
    return None if value is None else 1 / value


def rows(lines):
    """Yields (description, measured value, "<=" or ">=", bound)."""
    reduce = {"what": "all_reduce", "ranks": 2}
    large, four = {**reduce, "bytes": 250 << 20}, {"what": "all_reduce", "ranks": 4}
    own = find(lines, "lockstep", **large)
    yield "250M: time relative to memcpy on both cores", own and own.get("ratio_to_memcpy"), "<=", 0.62
    for baseline, bound in (("gloo", 12), ("openmpi-4", 9), ("openmpi-5", 9), ("mpich", 9), ("intel-mpi", 9)):
        yield f"250M: time of {baseline} relative to Lockstep", times(lines, "lockstep", baseline, **large), ">=", bound
    yield (
        "250M, ordinary memory: time of the best baseline relative to Lockstep",
        best_baseline(lines, "lockstep-ordinary", **large),
        ">=",
        1,
    )
    yield (
        "250M, 4 ranks: time of the best baseline relative to Lockstep",
        best_baseline(lines, "lockstep", **four, bytes=250 << 20),
        ">=",
        1,
    )
    for size, name in ((1 << 20, "1M"), (64 << 10, "64K")):
        yield (
            f"{name}: time of the best baseline relative to Lockstep",
            best_baseline(lines, "lockstep", **reduce, bytes=size),
            ">=",
            4,
        )
    yield (
        "4K: time relative to Open MPI 4.1",
        inverse(times(lines, "lockstep", "openmpi-4", **reduce, bytes=4096)),
        "<=",
        0.7,
    )
    yield (
        "8 bytes: time relative to Open MPI 4.1",
        inverse(times(lines, "lockstep", "openmpi-4", **reduce, bytes=8)),
        "<=",
        1.5,
    )
    yield (
        "4K, 4 ranks: time relative to Open MPI 4.1",
        inverse(times(lines, "lockstep", "openmpi-4", **four, bytes=4096)),
        "<=",
        0.7,
    )
    for model, (fused, plain, ddp) in STEPS.items():
        step = {"what": "step", "model": model, "optimizer": "sgd"}
        yield (
            f"step {model}, fused: time relative to unsynchronised ranks",
            times(lines, "unsynchronised-tuned", FUSED, **step),
            "<=",
            fused,
        )
        yield (
            f"step {model}, torch's SGD: time relative to unsynchronised ranks",
            times(lines, "unsynchronised-tuned", OWN, **step),
            "<=",
            plain,
        )
        yield (
            f"step {model}: time of PyTorch's DDP relative to the fused step",
            times(lines, FUSED, DDP, **step),
            ">=",
            ddp,
        )
    step = {"what": "step", "model": "mlp-50m", "optimizer": "adamw"}
    yield (
        "step mlp-50m, AdamW fused: time relative to unsynchronised ranks",
        times(lines, "unsynchronised-tuned", FUSED, **step),
        "<=",
        0.45,
    )
    yield (
        "memory of 4 ranks, AdamW fused: relative to PyTorch's DDP",
        times(lines, DDP, FUSED, what="memory"),
        "<=",
        0.5,
    )
    yield (
        "arena: time of forward and backward relative to malloc",
        inverse(times(lines, "arena", "malloc", what="backward")),
        "<=",
        0.6,
    )
    growth = {line["impl"]: line["ratio"] for line in lines if line["what"] == "arena_growth"}
    yield "arena: high water relative to peak in use, 2000 steps", growth.get("high water after 2000 steps"), "<=", 1.15
    late, early = growth.get("high water after 2000 steps"), growth.get("high water after 200 steps")
    yield "arena: growth after step 200", late / early if late and early else None, "<=", 1
    yield "launch: time of torchrun relative to Lockstep", times(lines, "lockstep", "torchrun", what="launch"), ">=", 10


def compare(lines):
    """Yields a line of text per target."""
    for what, value, relation, bound in rows(lines):
        if value is None:
            yield f"  -       {what}: not measured, target {relation} {bound}"
            continue
        good = value <= bound if relation == "<=" else value >= bound
        yield f"  {'holds ' if good else 'MISSED'}  {what}: {value:.3f}, target {relation} {bound}"
