#!/usr/bin/env python3
"""Tests that check_history.py detects each violation in an otherwise valid history."""

import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import check_history  # noqa: E402

INTERVAL = 4
RANKS = 2
SAMPLES = 8  # per rank and step


def state(step):
    """Returns the hash of the parameters before that step."""
    return f"{step * 7919:016x}"


def line(gen, step, rank, mono_ns):
    first = (step * RANKS + rank) * SAMPLES
    return {
        "mono_ns": mono_ns,
        "gen": gen,
        "step": step,
        "rank": rank,
        "world": RANKS,
        "first_sample": first,
        "last_sample": first + SAMPLES - 1,
        "params_before": state(step),
        "params_after": state(step + 1),
        "checkpoint": (step + 1) // INTERVAL if (step + 1) % INTERVAL == 0 else None,
    }


def valid_history():
    """Returns the history of three generations.

    The first ends after step 6, for which rank 1 wrote nothing; the second starts from checkpoint 1 and ends after step
    9; the third starts from checkpoint 2 and finishes.
    """
    lines, now = [], 0
    for gen, begin, end in ((0, 0, 7), (1, 4, 10), (2, 8, 16)):
        for step in range(begin, end):
            for rank in range(RANKS):
                now += 1000
                if (gen, step, rank) != (0, 6, 1):
                    lines.append(line(gen, step, rank, now))
    return lines


class CheckHistory(unittest.TestCase):
    def wrong(self, change, interval=INTERVAL):
        lines = valid_history()
        at = {(one["gen"], one["step"], one["rank"]): one for one in lines}
        change(lines, at)
        return check_history.check(lines, interval)

    def expect(self, invariant, change, text="", interval=INTERVAL):
        wrong = self.wrong(change, interval)
        self.assertTrue(any(one.startswith(invariant + ":") and text in one for one in wrong), wrong)

    def test_valid_history_passes(self):
        self.assertEqual(self.wrong(lambda lines, at: None), [])

    def test_empty_history_is_an_error(self):
        self.assertEqual(check_history.check([], INTERVAL), ["no step was committed"])

    def test_h1_ranks_differ(self):
        self.expect("H1", lambda lines, at: at[1, 5, 1].update(params_after="x"), "generation 1, step 5")

    def test_h1_rank_commits_twice(self):
        self.expect("H1", lambda lines, at: lines.append(dict(at[1, 5, 1])), "twice")

    def test_h2_missing_step(self):
        def change(lines, at):
            lines[:] = [one for one in lines if (one["gen"], one["step"]) != (1, 7)]

        self.expect("H2", change, "step 8 after step 6")

    def test_h2_step_begins_with_another_state(self):
        def change(lines, at):
            for rank in range(RANKS):
                at[2, 11, rank]["params_before"] = "x"

        self.expect("H2", change, "step 11 does not begin")

    def test_h3_state_that_was_never_saved(self):
        def change(lines, at):  # generation 1 begins one step later, from a state that was committed but not saved
            lines[:] = [one for one in lines if (one["gen"], one["step"]) != (1, 4)]

        self.expect("H3", change, "generation 1 begins at step 5 with a state that was not saved")

    def test_h3_another_state_under_the_same_step(self):
        def change(lines, at):
            for step in range(8, 16):
                for rank in range(RANKS):
                    at[2, step, rank]["params_before"] += "x"
                    at[2, step, rank]["params_after"] += "x"

        self.expect("H3", change, "generation 2 begins at step 8 with a state that was not saved")

    def test_h3_checkpoint_of_an_abandoned_history(self):
        # Generation 1 starts from scratch with other states, and 2 continues from a checkpoint of generation 0.
        def change(lines, at):
            lines[:] = [one for one in lines if one["gen"] != 1]
            now = max(one["mono_ns"] for one in lines if one["gen"] == 0)
            for one in lines:
                if one["gen"] == 2:
                    one["mono_ns"] += 10**9
            for step in range(3):
                for rank in range(RANKS):
                    now += 1000
                    new = line(1, step, rank, now)
                    if step > 0:
                        new["params_before"] += "y"
                    new["params_after"] += "y"
                    lines.append(new)
            lines[:] = [one for one in lines if one["gen"] != 2 or one["step"] >= 8]
            lines.extend(line(2, step, rank, 2 * 10**9) for step in range(4, 8) for rank in range(RANKS))
            for one in lines:
                if one["gen"] == 2:
                    one["mono_ns"] = 2 * 10**9 + one["step"]

        self.expect("H3", change, "generation 2 begins at step 4 with a state that was not saved", interval=100)

    def test_h3_too_many_steps_are_lost(self):
        self.expect("H3", lambda lines, at: None, "3 steps are lost, expected at most 2", interval=2)

    def test_h4_sample_drawn_twice(self):
        def change(lines, at):
            for rank in range(RANKS):
                at[2, 12, rank].update(
                    first_sample=at[2, 11, rank]["first_sample"], last_sample=at[2, 11, rank]["last_sample"]
                )

        self.expect("H4", change, "in step 11")

    def test_h4_same_samples_in_two_epochs(self):
        def change(lines, at):
            for one in lines:
                if one["step"] >= 8:
                    one.update(epoch=1, first_sample=one["first_sample"] - 128, last_sample=one["last_sample"] - 128)

        self.assertEqual(self.wrong(change), [])

    def test_h5_stale_rank_commits(self):
        def change(lines, at):
            stale = line(0, 6, 1, at[1, 8, 0]["mono_ns"])
            lines.append(stale)

        self.expect("H5", change, "rank 1 of generation 0 committed step 6 after generation 1 had begun")

    def test_truncated_line_is_ignored(self):
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.write('{"gen": 0, "step": 1}\n{"gen": 0, "st')
            file.flush()
            self.assertEqual(check_history.read([file.name]), [{"gen": 0, "step": 1}])


if __name__ == "__main__":
    unittest.main()
