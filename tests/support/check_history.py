#!/usr/bin/env python3
"""Checks the invariants of the history of a job that was restarted several times.

usage: check_history.py --interval K FILE...
A rank appends a line of JSON to its file after it has committed a step and before it saves that step:
  mono_ns                     the monotonic clock, which all ranks share
  gen, step, rank, world      generation, step and rank count from 0
  first_sample, last_sample   the samples drawn in this step, or "samples", a list; "epoch" defaults to 0
  params_before, params_after hashes
  checkpoint                  the number under which this step will be saved; null if it is not saved
The invariants, as far as the lines go (SIGKILL may truncate the last line of a file):
  H1  for a generation and step, all ranks have the same hashes
  H2  the steps of a generation have no gap, and each begins with the final state of the previous one
  H3  a generation begins with the state of a step that was to be saved, or with the initial state; at most K committed
      steps are lost
  H4  in the history that led to the final state, no sample is drawn twice in an epoch
  H5  no generation commits a step after a later generation has begun
Prints one line per violation, and exits with 1 if there is one.
"""

import argparse
import collections
import json
import sys


def read(paths):
    """Returns all records of all ranks."""
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
    """Returns {generation: {step: lines of its ranks}}, in order."""
    steps = collections.defaultdict(lambda: collections.defaultdict(list))
    for line in lines:
        steps[line["gen"]][line["step"]].append(line)
    return {gen: dict(sorted(steps[gen].items())) for gen in sorted(steps)}


def check_ranks(generations):
    for gen, steps in generations.items():
        for step, lines in steps.items():
            for what in ("params_before", "params_after", "world", "checkpoint"):
                if len({line[what] for line in lines}) > 1:
                    differing = sorted({line["rank"] for line in lines})
                    yield f"H1: generation {gen}, step {step}: {what} differs between ranks {differing}"
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
                yield f"H2: generation {gen}, step {step} does not begin with the final state of step {before}"
            before = step


def check_restored(generations, interval):
    first = None
    saved = {}  # steps that were to be saved: step -> hash after it
    newest = None  # newest committed step
    for gen, steps in generations.items():
        begin = next(iter(steps))
        lines = steps[begin]
        if first is None:
            first = (begin, lines[0]["params_before"])
        elif (begin, lines[0]["params_before"]) != first and saved.get(begin - 1) != lines[0]["params_before"]:
            yield f"H3: generation {gen} begins at step {begin} with a state that was not saved"
        if newest is not None and newest - (begin - 1) > interval:
            yield (
                f"H3: generation {gen} begins at step {begin}, after step {newest} was committed: "
                f"{newest - begin + 1} steps are lost, expected at most {interval}"
            )
        # Later states than the one with which this generation begins belong to an abandoned history.
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
    """Returns step -> lines of the last generation that committed the step."""
    history = {}
    for steps in generations.values():
        begin = next(iter(steps))
        history = {**{step: lines for step, lines in history.items() if step < begin}, **steps}
    return history


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
                yield (
                    f"H4: sample {first} of epoch {epoch} was drawn by rank {rank} in step {step} "
                    f"and by rank {other_rank} in step {other_step}"
                )


def check_generations(generations):
    began = {
        gen: min(line["mono_ns"] for lines in steps.values() for line in lines) for gen, steps in generations.items()
    }
    for gen, steps in generations.items():
        for step, lines in steps.items():
            for line in lines:
                later = [other for other in generations if other > gen and began[other] < line["mono_ns"]]
                if later:
                    yield (
                        f"H5: rank {line['rank']} of generation {gen} committed step {step} "
                        f"after generation {later[0]} had begun"
                    )


def check(lines, interval):
    """Returns a description of each violation."""
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
    print("\n".join(wrong) or "the history is valid")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
