#!/usr/bin/env python3
"""Opens thousands of unauthenticated connections to the listeners of a training, which must not be affected.

Usage: unauthenticated_connections.py --lockstep PATH --program PATH_OF_TRAIN_PROBE [--connections N]
           [--transport NAME] [--seed N] [--more-kib N]
The connections send nothing, single bytes, zeros, random bytes or parts of the handshakes of the store and of ranks, to
every port of the job, from its start on. One rank joins late, during the attack. The same training runs undisturbed
before and after it, for its time and its hashes. The script checks that
  - each listener is bound to one address, and only the launcher listens while the ranks train;
  - the job succeeds with the hashes of an undisturbed one, and the late rank joins;
  - no connection but one that begins as a rank's receives a byte, and that one at most 256, without data;
  - the process that serves the store grows by at most 1 MiB (--more-kib).
"""

import argparse
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import history  # noqa: E402
from strangers import Attack, listeners  # noqa: E402
from tagged_processes import find_tagged  # noqa: E402

MARK = "LOCKSTEP_TEST_UNAUTHENTICATED"
RANKS, STEPS = 3, 300
LATE_S = 3


def resident_kib(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def cpu_s(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Training:
    """A running job whose rank 2 joins LATE_S seconds late."""

    def __init__(self, args, folder, rng):
        self.folder = pathlib.Path(folder)
        self.mark = f"{os.getpid()}.{rng.randrange(1 << 48)}"
        words = f'[ "$LOCKSTEP_RANK" = 2 ] && sleep {LATE_S}; exec "$@"'
        self.job = subprocess.Popen(
            [
                args.lockstep,
                "run",
                "-n",
                str(RANKS),
                "--bind",
                "none",
                "--transport",
                args.transport,
                "--",
                "sh",
                "-c",
                words,
                "sh",
                args.program,
                "chaos",
                folder,
                str(STEPS),
            ],
            env={**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1"},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def processes(self):
        return list(find_tagged(MARK, self.mark))

    def histories(self):
        return [history.read(self.folder, rank) for rank in range(RANKS)]

    def end(self):
        """Blocks until the job ends. Returns (errors, seconds of the steps after the first 20)."""
        try:
            _, err = self.job.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            return ["it did not end"], 0
        finally:
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
            self.job.wait()
        lines = history.steps(self.histories()[0])
        wrong = [f"exit code {self.job.returncode}: {err[-500:]}"] if self.job.returncode != 0 else []
        return wrong, (lines[-1]["ns"] - lines[20]["ns"]) / 1e9 if len(lines) == STEPS else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--connections", type=int, default=10000)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--more-kib", type=int, default=1024, help="by how much the launcher may grow")
    args = parser.parse_args()
    print(f"seed {args.seed}, {args.connections} connections, transport {args.transport}", flush=True)
    rng = random.Random(args.seed)
    wrong, times, hashes = [], {}, None
    for part in ("before", "attacked", "after"):
        with tempfile.TemporaryDirectory() as folder:
            training = Training(args, folder, rng)
            if part == "attacked":
                wrong += attack_training(args, training, rng)
            bad, times[part] = training.end()
            wrong += [f"{part}: {text}" for text in bad]
            all_histories = training.histories()
            wrong += history.check_hashes(all_histories, hashes) + history.check_samples(all_histories, True)
            hashes = hashes or {line["step"]: line["hash"] for line in history.steps(all_histories[0])}
    ratio = times["attacked"] / max(1e-9, (times["before"] + times["after"]) / 2)
    print(
        "; ".join(f"{part} {seconds:.3f} s" for part, seconds in times.items())
        + f" for {STEPS - 20} steps: {ratio:.3f} of undisturbed"
    )
    if wrong:
        sys.exit("; ".join(wrong))


def attack_training(args, training, rng):
    """Attacks a training from its start, while it waits for its late rank, and while it trains. Returns errors."""
    launcher, attack, wrong = training.job.pid, Attack(rng), []

    def find():
        found = listeners(training.processes())
        for pid, address, port in found:
            if address != "127.0.0.1":
                wrong.append(f"process {pid} listens on {address}:{port}")
        return found

    def ports():
        return [port for _, _, port in find()]

    attack.run(ports, 200, time.monotonic() + 1)  # memory that the first connections allocate is kept
    if not ports():
        return ["the launcher does not listen"]
    before, cpu_before = resident_kib(launcher), cpu_s(launcher)
    attack.run(ports, args.connections // 2, time.monotonic() + LATE_S)
    end = time.monotonic() + 30
    while {pid for pid, _, _ in find()} != {launcher}:  # until the ranks are connected
        attack.run(ports, 10, time.monotonic() + 0.02)
        if time.monotonic() > end:
            return [f"ranks still listen: {find()}"]
    attack.run(ports, args.connections - args.connections // 2, time.monotonic() + 2)
    wrong += [f"rank {pid} listens at port {port} while it trains" for pid, _, port in find() if pid != launcher]
    attack.end()
    more = resident_kib(launcher) - before
    print(
        f"the launcher grew by {more} KiB and used {cpu_s(launcher) - cpu_before:.2f} s of processor time",
        flush=True,
    )
    if more > args.more_kib:
        wrong.append(f"the launcher grew by {more} KiB; expected at most {args.more_kib}")
    return sorted(set(wrong + attack.answered))[:10]


main()
