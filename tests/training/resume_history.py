"""Converts the histories of resumable_training.cc to the format of tests/support/check_history.py, and checks them.

Each start of a training is a generation in that format, for restarts by the launcher and by a test.
"""

import collections
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import check_history  # noqa: E402


def read_starts(folder):
    """Returns {start: (step that it resumes after, lines)}.

    The lines of a rank include its starts; a rank that did not exist in some start has fewer of them.
    """
    starts, ranks = {}, {}
    for name in os.listdir(folder):
        if name.startswith("rank."):
            with open(os.path.join(folder, name), encoding="utf8") as file:
                ranks[int(name.split(".")[1])] = [json.loads(line) for line in file if line.endswith("}\n")]
    # Rank 0 exists in every start.
    worlds = [line["world"] for line in ranks.get(0, []) if "pid" in line]
    for rank, lines in ranks.items():
        number = -1
        for line in lines:
            if "pid" in line:
                number += 1
                while number < len(worlds) and worlds[number] <= rank:
                    number += 1
                starts.setdefault(number, (line["begins_after"], []))
            else:
                starts[number][1].append(
                    {
                        **line,
                        "gen": number,
                        "params_before": line["before"],
                        "params_after": line["after"],
                        "checkpoint": line["step"],
                    }
                )
    return starts


def check(folder, samples, max_lost, epochs=None):
    """Returns a list of errors. With `epochs`, checks that each of these epochs has all `samples`."""
    lines = [line for _, some in read_starts(folder).values() for line in some]
    wrong = check_history.check(lines, max_lost)
    if epochs is not None:
        drawn = collections.Counter()
        for of_step in check_history.final_history(check_history.by_step(lines)).values():
            for line in of_step:
                drawn[line["epoch"]] += len(line["samples"])
        wrong += [
            f"H4: epoch {epoch} has {drawn[epoch]} of {samples} samples"
            for epoch in range(epochs)
            if drawn[epoch] != samples
        ]
    return wrong[:5]
