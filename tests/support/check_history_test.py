#!/usr/bin/env python3
"""check_history.py finds each thing that must not be, in a history that is good but for it."""

import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import check_history  # noqa: E402

INTERVAL = 4
RANKS = 2
SAMPLES = 8  # of a rank in a step


def state(step):
    """The hash before that step."""
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


def good():
    """Three starts: the first ends after step 6, the second, from checkpoint 1, after step 9, and the third, from checkpoint 2, comes to its end. Of the last step of the first one rank 1 wrote nothing."""
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
        lines = good()
        at = {(one["gen"], one["step"], one["rank"]): one for one in lines}
        change(lines, at)
        return check_history.check(lines, interval)

    def expect(self, invariant, change, text="", interval=INTERVAL):
        wrong = self.wrong(change, interval)
        self.assertTrue(any(one.startswith(invariant + ":") and text in one for one in wrong), wrong)

    def test_a_good_one_is_good(self):
        self.assertEqual(self.wrong(lambda lines, at: None), [])

    def test_nothing_is_not_good(self):
        self.assertEqual(check_history.check([], INTERVAL), ["no step was committed"])

    def test_h1_ranks_differ(self):
        self.expect("H1", lambda lines, at: at[1, 5, 1].update(params_after="x"), "generation 1, step 5")

    def test_h1_a_rank_is_there_twice(self):
        self.expect("H1", lambda lines, at: lines.append(dict(at[1, 5, 1])), "twice")

    def test_h2_a_step_is_missing(self):
        def change(lines, at):
            lines[:] = [one for one in lines if (one["gen"], one["step"]) != (1, 7)]

        self.expect("H2", change, "step 8 after step 6")

    def test_h2_a_step_begins_with_another_state(self):
        def change(lines, at):
            for rank in range(RANKS):
                at[2, 11, rank]["params_before"] = "x"

        self.expect("H2", change, "step 11 does not begin")

    def test_h3_a_state_that_was_never_saved(self):
        def change(lines, at):  # generation 1 begins a step later: from what was committed, but not saved
            lines[:] = [one for one in lines if (one["gen"], one["step"]) != (1, 4)]

        self.expect("H3", change, "generation 1 begins at step 5 with a state that was not saved")

    def test_h3_another_state_under_the_same_step(self):
        def change(lines, at):
            for step in range(8, 16):
                for rank in range(RANKS):
                    at[2, step, rank]["params_before"] += "x"
                    at[2, step, rank]["params_after"] += "x"

        self.expect("H3", change, "generation 2 begins at step 8 with a state that was not saved")

    def test_h3_a_checkpoint_of_a_way_that_was_left(self):
        # Generation 1 begins anew, with other states, and 2 goes on from a checkpoint of generation 0.
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

    def test_h3_too_much_is_lost(self):
        self.expect("H3", lambda lines, at: None, "3 steps are lost, allowed are 2", interval=2)

    def test_h4_a_sample_twice(self):
        def change(lines, at):
            for rank in range(RANKS):
                at[2, 12, rank].update(
                    first_sample=at[2, 11, rank]["first_sample"], last_sample=at[2, 11, rank]["last_sample"]
                )

        self.expect("H4", change, "in step 11")

    def test_h4_an_epoch_each(self):
        def change(lines, at):
            for one in lines:
                if one["step"] >= 8:
                    one.update(epoch=1, first_sample=one["first_sample"] - 128, last_sample=one["last_sample"] - 128)

        self.assertEqual(self.wrong(change), [])

    def test_h5_a_stale_rank_commits(self):
        def change(lines, at):
            stale = line(0, 6, 1, at[1, 8, 0]["mono_ns"])
            lines.append(stale)

        self.expect("H5", change, "rank 1 of generation 0 committed step 6 after generation 1 had begun")

    def test_a_line_that_was_cut_is_no_line(self):
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.write('{"gen": 0, "step": 1}\n{"gen": 0, "st')
            file.flush()
            self.assertEqual(check_history.read([file.name]), [{"gen": 0, "step": 1}])


if __name__ == "__main__":
    unittest.main()
