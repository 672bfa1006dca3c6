"""docs/benchmarks.md from lines of JSON of `lockstep bench`."""

import plots

EXPLAINED = {
    "lockstep": "Lockstep; tensors in the arena, memory that the ranks share",
    "lockstep-ordinary": "Lockstep; tensors in ordinary memory (LOCKSTEP_ARENA=off), copied on the way",
    "gloo": "c10d::ProcessGroupGloo of this libtorch, called from C++",
    "memcpy": "each rank copies as many bytes from a buffer of its own to another: the yardstick",
    "unsynchronised": "as many processes that do not know of each other, torch::optim",
    "reducer": "c10d::Reducer over gloo from C++, torch::optim",
    "pytorch-ddp": "DistributedDataParallel over gloo in Python, torch.optim",
}
HEAD = """# Benchmarks

Written by `make bench` ({lockstep}); nothing here is typed by hand. {cpu}, {cores} cores, {memory:.0f} GiB, Linux {kernel}, {compiler}, libtorch {libtorch}.
Load before: {load}.

How it is measured: all implementations are started once and take turns, round after round, in an order that rotates; between turns a rank
waits in read(2). A ratio is the median over the rounds of (time / time of the first) in the same round. Spread is (upper quartile - lower
quartile) / median of the rounds' medians; beyond 15 % there are more rounds, and what is uneven even then is marked noisy. Every rank has
one thread. Lockstep's ranks are bound to cores and peers' under `lockstep run` are not, which are the defaults of Lockstep and of torchrun;
MPI binds as it does by itself, with --oversubscribe for Open MPI where there are more ranks than cores. MPI_Allreduce is measured in place and
from buffer to buffer, and the faster counts. "-tuned" is malloc told to keep its memory (MALLOC_MMAP_MAX_=0
MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=1000000000). Compare ratios, not times: this memory's bandwidth changes from minute to minute.
"""


def size_text(count):
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if count % unit == 0:
            return f"{count // unit}{letter}"
    return str(count)


def time_text(seconds):
    units = (("s", 1), ("ms", 1e3), ("us", 1e6))
    unit, factor = next((pair for pair in units if seconds * pair[1] >= 1), units[-1])
    value = seconds * factor
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"


def groups(lines, what):
    """Races: lines that differ in the implementation only."""
    found = {}
    for line in lines:
        if line["what"] == what:
            key = tuple(line.get(name) for name in ("ranks", "bytes", "model", "optimizer"))
            found.setdefault(key, []).append(line)
    return list(found.values())


def table(race):
    with_memcpy = any("ratio_to_memcpy" in row for row in race)
    head = ["", "median", "least", "spread", f"ratio to {race[0]['ratio_to']}"] + (
        ["ratio to memcpy"] if with_memcpy else []
    )
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in race:
        cells = [
            row["impl"] + (" (noisy)" if row["noisy"] else ""),
            time_text(row["median_s"]),
            time_text(row["min_s"]),
            f"{100 * row['spread']:.1f} %",
            f"{row['ratio']:.3f}",
        ]
        if with_memcpy:
            cells.append(f"{row['ratio_to_memcpy']:.3f}" if "ratio_to_memcpy" in row else "")
        yield f"| {' | '.join(cells)} |"


def bandwidth(race):
    return (
        f" Memory: {race[0]['bandwidth'] / 1e9:.0f} GB/s (memcpy of all ranks together, bytes read and written)."
        if "bandwidth" in race[0]
        else ""
    )


def all_reduce(lines, folder):
    yield "\n## all_reduce of float32\n"
    yield "The yardstick is memcpy of as many bytes by every core, each from a buffer of its own: with two ranks and 250 MB it reads 500 MB and"
    yield "writes 500 MB, which is also what an all-reduce in place must do."
    races = groups(lines, "all_reduce")
    for ranks in sorted({race[0]["ranks"] for race in races}):
        same = [race for race in races if race[0]["ranks"] == ranks]
        name = f"all_reduce_{ranks}.svg"
        (folder / name).write_text(plots.curves(f"all_reduce, {ranks} ranks: time by size", same))
        yield f"\n![all_reduce of {ranks} ranks](benchmarks/{name})"
        for race in same:
            yield f"\n{ranks} ranks, {size_text(race[0]['bytes'])}.{bandwidth(race)}\n"
            yield from table(race)


def steps(lines, folder):
    races = groups(lines, "step")
    if not races:
        return
    yield "\n## A training step\n"
    yield "Forward, backward with the exchange of gradients, and the optimizer's step; SGD has momentum 0.9. The same operations in C++ and in Python."
    (folder / "step.svg").write_text(
        plots.bars(
            "step: time, Lockstep's being 1", [(f"{race[0]['model']}, {race[0]['optimizer']}", race) for race in races]
        )
    )
    yield "\n![training steps](benchmarks/step.svg)"
    for race in races:
        first = race[0]
        yield f"\n{first['model']} ({first['parameters']:,} parameters), {first['optimizer']}, {first['ranks']} ranks.{bandwidth(race)}\n"
        yield from table(race)


def other_times(lines):
    for what, title in (
        ("launch", "## Starting and ending ranks of /bin/true"),
        ("backward", "## The arena alone: forward and backward in one process"),
    ):
        for race in groups(lines, what):
            yield f"\n{title}\n\n{race[0]['ranks']} {'rank' if race[0]['ranks'] == 1 else 'ranks'}{', ' + race[0]['model'] if 'model' in race[0] else ''}.\n"
            yield from table(race)


def memory(lines):
    titles = {
        "memory": "## Memory: sum of the ranks' proportional set sizes",
        "arena_growth": "## How far the arena grows while batch sizes vary",
    }
    for what, title in titles.items():
        for race in groups(lines, what):
            first = race[0]
            yield f"\n{title}\n\n{first['ranks']} {'rank' if first['ranks'] == 1 else 'ranks'}, {first['model']}, {first['optimizer']}.\n"
            yield f"| | MiB | ratio to {first['ratio_to']} |\n|---|---|---|"
            for row in race:
                yield f"| {row['impl']} | {row['bytes_used'] / (1 << 20):.0f} | {row['ratio']:.3f} |"


def names(lines):
    used = {line.get("impl") for line in lines}
    yield "\n## Names\n\n| name | what it is |\n|---|---|"
    for name, text in EXPLAINED.items():
        if name in used:
            yield f"| {name} | {text} |"


def write(lines, docs):
    folder = docs / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    machine = lines[0]
    head = HEAD.format(
        **{key: machine[key] for key in ("lockstep", "cpu", "cores", "kernel", "compiler", "libtorch")},
        memory=machine["memory_bytes"] / (1 << 30),
        load=machine["load_before"],
    )
    parts = [*all_reduce(lines, folder), *steps(lines, folder), *other_times(lines), *memory(lines), *names(lines)]
    (docs / "benchmarks.md").write_text(head + "\n".join(parts) + "\n")
