#!/usr/bin/env python3
"""What must be true of the history of a job that was started again and again, whatever happened to it.

usage: check_history.py --interval K FILE...
A rank appends a line of JSON to its file when it has committed a step, and before it saves it:
  mono_ns                     the monotonic clock, the same for all ranks
  gen, step, rank, world      of a job's starts the first is 0; so are steps and ranks
  first_sample, last_sample   that it drew in this step, or "samples", a list; "epoch" says of which, 0 when it does not
  params_before, params_after hashes
  checkpoint                  the number under which this step is going to be saved; null when it is not
Checked are, as far as the lines go (the last one of a file may be cut by a SIGKILL):
  H1  for a generation and step all ranks have the same hashes
  H2  the steps of a generation are a chain without a gap, and each begins with what the one before came to
  H3  a generation begins with the state of a step that was to be saved, or with the very first one; at most K committed steps are lost
  H4  on the way that led to the end no sample is drawn twice in an epoch
  H5  no step is committed by a generation after a later one has begun
Prints what is wrong, a line each, and ends with 1 then.
"""

import argparse
import collections
import json
import sys


def read(paths):
    """All lines of all ranks."""
    lines = []
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as file:
            for text in file:
                try:
                    lines.append(json.loads(text))
                except json.JSONDecodeError:
                    pass
    return lines


def by_step(lines):
    """{generation: {step: lines of its ranks}}, in order."""
    steps = collections.defaultdict(lambda: collections.defaultdict(list))
    for line in lines:
        steps[line["gen"]][line["step"]].append(line)
    return {gen: dict(sorted(steps[gen].items())) for gen in sorted(steps)}


def check_ranks(generations):
    for gen, steps in generations.items():
        for step, lines in steps.items():
            for what in ("params_before", "params_after", "world", "checkpoint"):
                if len({line[what] for line in lines}) > 1:
                    yield f"H1: generation {gen}, step {step}: {what} differs between ranks {sorted({line['rank'] for line in lines})}"
            ranks = [line["rank"] for line in lines]
            if len(ranks) != len(set(ranks)):
                yield f"H1: generation {gen}, step {step} was committed twice by a rank: {sorted(ranks)}"


def check_chains(generations):
    for gen, steps in generations.items():
        before = None
        for step, lines in steps.items():
            if before is not None and step != before + 1:
                yield f"H2: generation {gen} has step {step} after step {before}"
            elif before is not None and lines[0]["params_before"] != steps[before][0]["params_after"]:
                yield f"H2: generation {gen}, step {step} does not begin with what step {before} came to"
            before = step


def check_restored(generations, interval):
    first = None
    saved = {}  # what was to be saved: step -> hash after it
    newest = None  # committed step
    for gen, steps in generations.items():
        begin = next(iter(steps))
        lines = steps[begin]
        if first is None:
            first = (begin, lines[0]["params_before"])
        elif (begin, lines[0]["params_before"]) != first and saved.get(begin - 1) != lines[0]["params_before"]:
            yield f"H3: generation {gen} begins at step {begin} with a state that was not saved"
        if newest is not None and newest - (begin - 1) > interval:
            yield f"H3: generation {gen} begins at step {begin}, after step {newest} was committed: {newest - begin + 1} steps are lost, allowed are {interval}"
        # What was saved later than the state that this generation begins with is on a way that was left.
        saved = {step: state for step, state in saved.items() if step < begin}
        saved.update(
            {
                step: lines[0]["params_after"]
                for step, lines in steps.items()
                if any(line["checkpoint"] is not None for line in lines)
            }
        )
        newest = max([*steps, *([] if newest is None else [newest])])


def final_history(generations):
    """step -> lines: of the last generation that made it."""
    way = {}
    for steps in generations.values():
        begin = next(iter(steps))
        way = {**{step: lines for step, lines in way.items() if step < begin}, **steps}
    return way


def ranges_of(line):
    return (
        [(sample, sample) for sample in line["samples"]]
        if "samples" in line
        else [(line["first_sample"], line["last_sample"])]
    )


def check_samples(generations):
    drawn = collections.defaultdict(list)
    for step, lines in final_history(generations).items():
        for line in lines:
            drawn[line.get("epoch", 0)] += [(first, last, step, line["rank"]) for first, last in ranges_of(line)]
    for epoch, ranges in drawn.items():
        ranges.sort()
        for (_, last, step, rank), (first, _, other_step, other_rank) in zip(ranges, ranges[1:]):
            if first <= last:
                yield f"H4: sample {first} of epoch {epoch} was drawn by rank {rank} in step {step} and by rank {other_rank} in step {other_step}"


def check_generations(generations):
    began = {
        gen: min(line["mono_ns"] for lines in steps.values() for line in lines) for gen, steps in generations.items()
    }
    for gen, steps in generations.items():
        for step, lines in steps.items():
            for line in lines:
                later = [other for other in generations if other > gen and began[other] < line["mono_ns"]]
                if later:
                    yield f"H5: rank {line['rank']} of generation {gen} committed step {step} after generation {later[0]} had begun"


def check(lines, interval):
    """What is wrong, in words."""
    generations = by_step(lines)
    if not generations:
        return ["no step was committed"]
    return [
        *check_ranks(generations),
        *check_chains(generations),
        *check_restored(generations, interval),
        *check_samples(generations),
        *check_generations(generations),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interval", type=int, required=True, help="steps between two checkpoints")
    parser.add_argument("files", nargs="+")
    options = parser.parse_args()
    wrong = check(read(options.files), options.interval)
    print("\n".join(wrong) or "the history is as it must be")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
