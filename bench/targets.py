"""What is asked of Lockstep on one host, as data, beside lines of JSON of `lockstep bench`."""

import re

OWN, FUSED, DDP = "lockstep", "lockstep-fused", "pytorch-ddp"
# Model: the fused step and the step with torch's SGD, each beside unsynchronised processes with tuned malloc; PyTorch's DDP beside the fused step.
STEPS = {
    "mlp-50m": (0.85, 1.22, 3.2),
    "mlp-65m": (0.83, 1.10, 2.2),
    "mlp-6m": (0.98, 1.10, 1.7),
    "transformer-2m": (0.98, 1.02, 1.15),
    "cnn-1m": (1.04, 1.06, 1.3),
}


def find(lines, impl, **wanted):
    """The line of an implementation, or of the first version of it; None when it was not measured."""
    for line in lines:
        name = line.get("impl", "")
        if re.fullmatch(re.escape(impl) + r"([-.][\d.]+)?", name) and all(
            line.get(key) == value for key, value in wanted.items()
        ):
            return line
    return None


def times(lines, own, other, **wanted):
    """How many times as long as `own` the `other` takes: from the rounds' ratios to a third where both have one."""
    first, second = find(lines, own, **wanted), find(lines, other, **wanted)
    return second["ratio"] / first["ratio"] if first and second else None


def best_baseline(lines, own, **wanted):
    peers = [times(lines, own, peer, **wanted) for peer in ("gloo", "openmpi-4", "openmpi-5", "mpich", "intel-mpi")]
    return min((peer for peer in peers if peer is not None), default=None)


def inverse(value):
    return None if value is None else 1 / value


def rows(lines):
    """(what, seen, "<=" or ">=", bound)"""
    reduce = {"what": "all_reduce", "ranks": 2}
    large, four = {**reduce, "bytes": 250 << 20}, {"what": "all_reduce", "ranks": 4}
    own = find(lines, "lockstep", **large)
    yield "250M beside memcpy on both cores", own and own.get("ratio_to_memcpy"), "<=", 0.62
    for peer, bound in (("gloo", 12), ("openmpi-4", 9), ("openmpi-5", 9), ("mpich", 9), ("intel-mpi", 9)):
        yield f"250M: {peer} takes so many times as long", times(lines, "lockstep", peer, **large), ">=", bound
    yield "250M, ordinary memory: the best peer takes", best_baseline(lines, "lockstep-ordinary", **large), ">=", 1
    yield "250M, 4 ranks: the best peer takes", best_baseline(lines, "lockstep", **four, bytes=250 << 20), ">=", 1
    for size, name in ((1 << 20, "1M"), (64 << 10, "64K")):
        yield f"{name}: the best peer takes", best_baseline(lines, "lockstep", **reduce, bytes=size), ">=", 4
    yield "4K: of Open MPI 4.1's time", inverse(times(lines, "lockstep", "openmpi-4", **reduce, bytes=4096)), "<=", 0.7
    yield (
        "8 bytes: of Open MPI 4.1's time",
        inverse(times(lines, "lockstep", "openmpi-4", **reduce, bytes=8)),
        "<=",
        1.5,
    )
    yield (
        "4K, 4 ranks: of Open MPI 4.1's time",
        inverse(times(lines, "lockstep", "openmpi-4", **four, bytes=4096)),
        "<=",
        0.7,
    )
    for model, (fused, plain, ddp) in STEPS.items():
        step = {"what": "step", "model": model, "optimizer": "sgd"}
        yield (
            f"step {model}, fused: of unsynchronised ranks' time",
            times(lines, "unsynchronised-tuned", FUSED, **step),
            "<=",
            fused,
        )
        yield (
            f"step {model}, torch's SGD: of unsynchronised ranks' time",
            times(lines, "unsynchronised-tuned", OWN, **step),
            "<=",
            plain,
        )
        yield (
            f"step {model}: PyTorch's DDP takes, of the fused step's time",
            times(lines, FUSED, DDP, **step),
            ">=",
            ddp,
        )
    step = {"what": "step", "model": "mlp-50m", "optimizer": "adamw"}
    yield (
        "step mlp-50m, AdamW fused: of unsynchronised ranks' time",
        times(lines, "unsynchronised-tuned", FUSED, **step),
        "<=",
        0.45,
    )
    yield "memory of 4 ranks, AdamW fused: of PyTorch's DDP's", times(lines, DDP, FUSED, what="memory"), "<=", 0.5
    yield (
        "arena: forward and backward beside malloc",
        inverse(times(lines, "arena", "malloc", what="backward")),
        "<=",
        0.6,
    )
    growth = {line["impl"]: line["ratio"] for line in lines if line["what"] == "arena_growth"}
    yield "arena: high water beside most in use, 2000 steps", growth.get("high water after 2000 steps"), "<=", 1.15
    late, early = growth.get("high water after 2000 steps"), growth.get("high water after 200 steps")
    yield "arena: growth after step 200", late / early if late and early else None, "<=", 1
    yield "launch: torchrun takes", times(lines, "lockstep", "torchrun", what="launch"), ">=", 10


def compare(lines):
    for what, seen, relation, bound in rows(lines):
        if seen is None:
            yield f"  -       {what}: not measured, asked {relation} {bound}"
            continue
        good = seen <= bound if relation == "<=" else seen >= bound
        yield f"  {'holds ' if good else 'MISSED'}  {what}: {seen:.3f}, asked {relation} {bound}"
