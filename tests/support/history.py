"""Reads the records that the ranks of train_probe write, and checks their invariants."""

import json


def read(folder, rank):
    """Returns the records of a rank: one with its pid, one per step with epoch, samples and hash, and a last one with
    the error that it received, or that it is done."""
    lines = []
    try:
        for line in (folder / f"rank.{rank}.jsonl").read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                pass  # the last line, truncated by SIGKILL
    except OSError:
        pass
    return lines


def steps(lines):
    return [line for line in lines if "step" in line]


def check_hashes(histories, reference):
    """Checks that after each step all ranks have the same hash, equal to that of a run without faults.

    `reference` maps steps to the hashes of that run, or is None.
    """
    wrong, seen = [], dict(reference or {})
    for rank, lines in enumerate(histories):
        for line in steps(lines):
            if seen.setdefault(line["step"], line["hash"]) != line["hash"]:
                wrong.append(f"rank {rank} has different parameters after step {line['step']}")
                break
    return wrong


def check_samples(histories, all_done):
    """Checks that no sample is drawn twice in an epoch, and, if `all_done`, that every epoch is complete."""
    drawn = {}
    wrong = []
    for rank, lines in enumerate(histories):
        for line in steps(lines):
            for sample in line["samples"]:
                other = drawn.setdefault(line["epoch"], {}).setdefault(sample, (rank, line["step"]))
                if other != (rank, line["step"]):
                    wrong.append(
                        f"sample {sample} of epoch {line['epoch']} was drawn by rank {other[0]} in step {other[1]} "
                        f"and by rank {rank} in step {line['step']}"
                    )
    if all_done:
        most = max((len(samples) for samples in drawn.values()), default=0)
        wrong += [
            f"epoch {epoch} has {len(samples)} samples of {most}"
            for epoch, samples in drawn.items()
            if len(samples) != most or sorted(samples) != list(range(most))
        ]
        wrong += ["no sample was drawn"] if most == 0 else []
    return wrong[:3]
