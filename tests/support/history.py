"""What the ranks of train_probe have written of themselves, and what must be true of it whatever happened."""

import json


def read(folder, rank):
    """The lines of a rank: one with its pid, one a step with epoch, samples and hash, at the end what it was told, or that it is done."""
    lines = []
    try:
        for line in (folder / f"rank.{rank}.jsonl").read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                pass  # its last one, cut by SIGKILL
    except OSError:
        pass
    return lines


def steps(lines):
    return [line for line in lines if "step" in line]


def check_hashes(histories, reference):
    """After each step all ranks have the same, and what a run without a fault has (`reference`: step -> hash, or None)."""
    wrong, seen = [], dict(reference or {})
    for rank, lines in enumerate(histories):
        for line in steps(lines):
            if seen.setdefault(line["step"], line["hash"]) != line["hash"]:
                wrong.append(f"rank {rank} has other parameters after step {line['step']}")
                break
    return wrong


def check_samples(histories, all_done):
    """Each sample at most once in an epoch over all ranks; exactly once, in every epoch that was walked to its end, when nothing failed."""
    drawn = {}
    wrong = []
    for rank, lines in enumerate(histories):
        for line in steps(lines):
            for sample in line["samples"]:
                other = drawn.setdefault(line["epoch"], {}).setdefault(sample, (rank, line["step"]))
                if other != (rank, line["step"]):
                    wrong.append(
                        f"sample {sample} of epoch {line['epoch']} was drawn by rank {other[0]} in step {other[1]} and by rank {rank} in step {line['step']}"
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
