"""What is asked of Lockstep on one host, as data, beside lines of JSON of `lockstep bench`."""

FUSED = ("lockstep-fused", "lockstep")  # the first that was measured counts
STEPS = ("mlp-50m", "mlp-65m", "mlp-6m", "transformer-2m", "cnn-1m")


def find(lines, impl, **wanted):
    """The line of an implementation; of several names the first that there is. None when it was not measured."""
    for name in (impl,) if isinstance(impl, str) else impl:
        for line in lines:
            if line.get("impl", "").startswith(name) and all(line.get(key) == value for key, value in wanted.items()):
                return line
    return None


def times(lines, own, other, **wanted):
    """How many times as long as `own` the `other` takes: from the rounds' ratios to a third where both have one."""
    first, second = find(lines, own, **wanted), find(lines, other, **wanted)
    return second["ratio"] / first["ratio"] if first and second else None


def best_peer(lines, own, **wanted):
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
    yield "250M, ordinary memory: the best peer takes", best_peer(lines, "lockstep-ordinary", **large), ">=", 1
    yield "250M, 4 ranks: the best peer takes", best_peer(lines, "lockstep", **four, bytes=250 << 20), ">=", 1
    for size, name in ((1 << 20, "1M"), (64 << 10, "64K")):
        yield f"{name}: the best peer takes", best_peer(lines, "lockstep", **reduce, bytes=size), ">=", 4
    yield "4K: of Open MPI 4.1's time", inverse(times(lines, "lockstep", "openmpi-4", **reduce, bytes=4096)), "<=", 0.7
    yield "8 bytes: of Open MPI 4.1's time", inverse(times(lines, "lockstep", "openmpi-4", **reduce, bytes=8)), "<=", 1.5
    yield "4K, 4 ranks: of Open MPI 4.1's time", inverse(times(lines, "lockstep", "openmpi-4", **four, bytes=4096)), "<=", 0.7
    for model in STEPS:
        for peer in ("unsynchronised-tuned", "pytorch-ddp-tuned", "reducer-tuned"):
            yield f"step {model}: {peer} takes", times(lines, FUSED, peer, what="step", model=model, optimizer="sgd"), ">=", 1
    yield "arena: forward and backward beside malloc", inverse(times(lines, "arena", "malloc", what="backward")), "<=", 0.6
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
