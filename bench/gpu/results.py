"""The results file of the GPU proof: JSON lines, of which the first describes the machine and the sources.

Every row is written and flushed when it is known, so a proof that is killed leaves all rows that were finished.
"""

import json
import os


class Refused(Exception):
    """This machine lacks what a row needs. The message says what."""


class Failed(Exception):
    """A row found something wrong. `details` becomes part of the row."""

    def __init__(self, text, **details):
        super().__init__(text)
        self.details = details


# A row of another commit or kind of machine says nothing about this one.
IDENTITY = ("source", "gpu", "cpus", "tiny")


def is_same(head, other):
    return all(head.get(key) == other.get(key) for key in IDENTITY)


def read_rows(path):
    """Yields the rows of a results file, and nothing after a row that was cut off when the machine was lost."""
    with open(path, encoding="utf-8") as file:
        for text in file:
            try:
                row = json.loads(text)
            except ValueError:
                return
            yield row


class Results:
    def __init__(self, path, head, resume):
        """Begins the file at `path`, or continues it if `resume` is true. Rows of other sources or of another kind of
        machine stay in it, but do not count as done."""
        self.done = {}  # by stage and name: the row
        before = list(read_rows(path)) if resume and os.path.exists(path) else []
        same = False
        for row in before:
            if row.get("what") == "head":
                same = is_same(row, head)
            elif same:
                self.done[row["stage"], row["row"]] = row
        part = f"{path}.part"  # a machine that is lost here must not take earlier rows with it
        self.file = open(part, "w", encoding="utf-8")
        for row in [*before, {"what": "head", **head}]:
            self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        os.replace(part, path)

    def _write(self, row):
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())

    def append(self, stage, name, outcome, **more):
        row = {"what": "row", "stage": stage, "row": name, "outcome": outcome, **more}
        self._write(row)
        self.done[stage, name] = row
        return row

    def is_done(self, stage, name, retry):
        """A row that failed or was refused on this kind of machine is repeated with `retry` only."""
        row = self.done.get((stage, name))
        return row is not None and not (retry and row["outcome"] != "done")
