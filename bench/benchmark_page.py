"""Writes docs/benchmarks.md from the JSON lines of `lockstep bench`."""

import re

import plots

DESCRIPTIONS = {
    "lockstep": "Lockstep; tensors in the arena, which the ranks share",
    "lockstep-ordinary": "Lockstep; tensors in ordinary memory (LOCKSTEP_ARENA=off), which Lockstep copies",
    "gloo": "c10d::ProcessGroupGloo of this libtorch, called from C++",
    "memcpy": "each rank copies the same number of bytes between two private buffers: the reference",
    "unsynchronised": "the same number of independent processes, torch::optim",
    "reducer": "c10d::Reducer over Gloo in C++, torch::optim",
    "pytorch-ddp": "DistributedDataParallel over Gloo in Python, torch.optim",
}
HEAD = """# Benchmarks

Written by `make bench` ({lockstep}); not edited by hand. {cpu}, {cores} cores, {memory:.0f} GiB,
Linux {kernel}, {compiler}, libtorch {libtorch}. Load before: {load}.

Method: all implementations are started once and measured in turns, in rotating order, for several rounds; between its
turns a rank blocks in read(2). A ratio is the median over the rounds of (time / time of the first) in the same round.
Spread is (upper quartile - lower quartile) / median of the medians of the rounds; above 15 %, more rounds are run, and
results that still vary are marked as noisy. Every rank has one thread. Lockstep's ranks are bound to cores and those of
the baselines are not, which are the defaults of `lockstep run` and of torchrun; MPI uses its default binding, with
--oversubscribe for Open MPI if there are more ranks than cores. MPI_Allreduce is measured in place and between buffers,
and the faster one counts. "-tuned" configures malloc to keep its memory (MALLOC_MMAP_MAX_=0
MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=1000000000). Compare ratios, not times: the memory bandwidth of this
machine changes from minute to minute.
"""


def size_text(count):
    for unit, suffix in ((1 << 20, "M"), (1 << 10, "K")):
        if count % unit == 0:
            return f"{count // unit}{suffix}"
    return str(count)


def time_text(seconds):
    units = (("s", 1), ("ms", 1e3), ("us", 1e6))
    unit, factor = next((pair for pair in units if seconds * pair[1] >= 1), units[-1])
    value = seconds * factor
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"


def ranks_text(count):
    return f"{count} {'rank' if count == 1 else 'ranks'}"


def groups(lines, what):
    """Returns comparisons: lists of lines that differ only in the implementation."""
    found = {}
    for line in lines:
        if line["what"] == what:
            key = tuple(line.get(name) for name in ("ranks", "bytes", "model", "optimizer"))
            found.setdefault(key, []).append(line)
    return list(found.values())


def table(comparison):
    with_memcpy = any("ratio_to_memcpy" in row for row in comparison)
    head = ["", "median", "min", "spread", f"ratio to {comparison[0]['ratio_to']}"] + (
        ["ratio to memcpy"] if with_memcpy else []
    )
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in comparison:
        columns = [
            row["impl"] + (" (noisy)" if row["noisy"] else ""),
            time_text(row["median_s"]),
            time_text(row["min_s"]),
            f"{100 * row['spread']:.1f} %",
            f"{row['ratio']:.3f}",
        ]
        if with_memcpy:
            columns.append(f"{row['ratio_to_memcpy']:.3f}" if "ratio_to_memcpy" in row else "")
        yield f"| {' | '.join(columns)} |"


def bandwidth(comparison):
    return (
        f" Memory: {comparison[0]['bandwidth'] / 1e9:.0f} GB/s (memcpy of all ranks together, bytes read and written)."
        if "bandwidth" in comparison[0]
        else ""
    )


def all_reduce(lines, folder):
    yield "\n## all_reduce of float32\n"
    yield "The reference is a memcpy of the same number of bytes by every rank, between private buffers: with two"
    yield "ranks and 250 MB it reads 500 MB and writes 500 MB, the minimum for an in-place all-reduce."
    comparisons = groups(lines, "all_reduce")
    for ranks in sorted({comparison[0]["ranks"] for comparison in comparisons}):
        same = [comparison for comparison in comparisons if comparison[0]["ranks"] == ranks]
        name = f"all_reduce_{ranks}.svg"
        (folder / name).write_text(plots.curves(f"all_reduce, {ranks} ranks: time by size", same))
        yield f"\n![all_reduce of {ranks} ranks](benchmarks/{name})"
        for comparison in same:
            yield f"\n{ranks} ranks, {size_text(comparison[0]['bytes'])}.{bandwidth(comparison)}\n"
            yield from table(comparison)


def steps(lines, folder):
    comparisons = groups(lines, "step")
    if not comparisons:
        return
    yield "\n## A training step\n"
    yield "Forward, backward with the gradient reduction, and the optimizer step; SGD has momentum 0.9."
    yield "The operations are the same in C++ and in Python."
    (folder / "step.svg").write_text(
        plots.bars(
            "step: time relative to Lockstep",
            [(f"{comparison[0]['model']}, {comparison[0]['optimizer']}", comparison) for comparison in comparisons],
        )
    )
    yield "\n![training steps](benchmarks/step.svg)"
    for comparison in comparisons:
        first = comparison[0]
        size = f"{first['model']} ({first['parameters']:,} parameters)"
        yield f"\n{size}, {first['optimizer']}, {first['ranks']} ranks.{bandwidth(comparison)}\n"
        yield from table(comparison)


def other_times(lines):
    for what, title in (
        ("launch", "## Starting and ending ranks of /bin/true"),
        ("backward", "## The arena alone: forward and backward in one process"),
    ):
        for comparison in groups(lines, what):
            model = ", " + comparison[0]["model"] if "model" in comparison[0] else ""
            yield f"\n{title}\n\n{ranks_text(comparison[0]['ranks'])}{model}.\n"
            yield from table(comparison)


MEMORY_TITLES = {
    "memory": "## Memory: sum of the ranks' proportional set sizes",
    "arena_growth": "## Growth of the arena with varying batch sizes",
}


def memory(lines):
    for what, title in MEMORY_TITLES.items():
        for comparison in groups(lines, what):
            first = comparison[0]
            yield f"\n{title}\n\n{ranks_text(first['ranks'])}, {first['model']}, {first['optimizer']}.\n"
            yield f"| | MiB | ratio to {first['ratio_to']} |\n|---|---|---|"
            for row in comparison:
                yield f"| {row['impl']} | {row['bytes_used'] / (1 << 20):.0f} | {row['ratio']:.3f} |"


def replace_memory(lines, docs):
    """Replaces the section about memory in benchmarks.md, and says with which libtorch it was measured."""
    page = docs / "benchmarks.md"
    sections = re.split(r"(?m)^(?=## )", page.read_text())
    title = MEMORY_TITLES["memory"]
    new = "\n".join(memory(lines)).strip() + f"\n\nMeasured by itself, with libtorch {lines[0]['libtorch']}.\n\n"
    page.write_text("".join(new if section.startswith(title + "\n") else section for section in sections))


def names(lines):
    used = {line.get("impl") for line in lines}
    yield "\n## Names\n\n| name | what it is |\n|---|---|"
    for name, text in DESCRIPTIONS.items():
        if name in used:
            yield f"| {name} | {text} |"


def write(lines, docs):
    """Writes benchmarks.md and the plots into the folder `docs`."""
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
