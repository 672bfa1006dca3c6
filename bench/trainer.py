#!/usr/bin/env python3
"""Measures the overhead of Lockstep's fit() and of Lightning's, each relative to a plain loop of the same model.

Usage: trainer.py --program bench_trainer [--turns N] [--steps N] [--width N]

Each process alternates blocks of 20 steps of the trainer and of the plain loop, and the two processes are measured in
turns. Both trainers have a progress bar on a pseudo-terminal, TensorBoard and CSV files, no checkpoints, and one
thread. Python needs what scripts/setup.sh --test-tools and --baselines install: .deps/python, .deps/tensorboard and
.deps/baselines/lightning.
"""

import argparse
import glob
import os
import pty
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

LIGHTNING_PROGRAM = r"""
import sys, time, torch, logging, warnings
warnings.filterwarnings("ignore"); logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
import pytorch_lightning as pl
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
steps, width, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
WARM, BLOCK, BATCH = 100, 20, 64
torch.set_num_threads(1)

def net():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(256, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 10))

batch = (torch.randn(BATCH, 256), torch.randint(10, (BATCH,)))

class Batches(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield batch

def loader():
    return torch.utils.data.DataLoader(Batches(), batch_size=None)

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__(); self.net = net()
    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

class InterleavedLoop(pl.Callback):
    "Runs a block of the plain loop after each block of the trainer's steps."
    def __init__(self):
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.batches = iter(loader())
        self.trainer_ms, self.plain_ms = [], []
    def on_train_batch_end(self, trainer, *rest):
        if trainer.global_step % BLOCK: return
        now = time.perf_counter()
        for _ in range(BLOCK):
            x, y = next(self.batches)
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
        end = time.perf_counter()
        if trainer.global_step > WARM:
            self.trainer_ms.append(1e3 * (now - self.begin) / BLOCK)
            self.plain_ms.append(1e3 * (end - now) / BLOCK)
        self.begin = end

loop = InterleavedLoop()
trainer = pl.Trainer(
    accelerator="cpu", devices=1, max_steps=steps, callbacks=[loop],
    logger=[CSVLogger(folder), TensorBoardLogger(folder)], enable_checkpointing=False, enable_model_summary=False)
trainer.fit(Module(), loader())
median = lambda v: sorted(v)[len(v) // 2]
added = median([t / p for t, p in zip(loop.trainer_ms, loop.plain_ms)]) - 1
print(f"plain_ms={median(loop.plain_ms):.4f} trainer_ms={median(loop.trainer_ms):.4f} added={added:.5f}", flush=True)
"""


def python_path():
    """Returns the Python interpreter with torch, and the search path of Lightning and TensorBoard."""
    deps = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ".deps")
    sites = [
        site
        for folder in ("baselines/lightning", "tensorboard")
        for site in glob.glob(os.path.join(deps, folder, "lib/python3*/site-packages"))
    ]
    if len(sites) < 2:
        raise SystemExit(
            "Lightning or TensorBoard is not installed; "
            "run scripts/setup.sh --test-tools, then scripts/setup.sh --baselines"
        )
    return os.path.join(deps, "python/bin/python3"), ":".join(sites)


def on_a_terminal(command, site=""):
    """Runs a command on a terminal of 100 columns and returns the three numbers in its last line."""
    main, child = pty.openpty()
    process = subprocess.Popen(
        ["sh", "-c", 'stty cols 100 rows 40; exec "$@"', "sh", *command],
        stdin=child,
        stdout=child,
        stderr=child,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", **({"PYTHONPATH": site} if site else {})},
        close_fds=True,
    )
    os.close(child)
    text = b""
    while True:
        try:
            some = os.read(main, 65536)
        except OSError:
            break
        if not some:
            break
        text += some
    os.close(main)
    if process.wait() != 0:
        raise SystemExit(f"{command[0]} exited with {process.returncode}\n{text.decode(errors='replace')[-2000:]}")
    found = re.search(r"plain_ms=([\d.]+) trainer_ms=([\d.]+) added=(-?[\d.]+)", text.decode(errors="replace"))
    return [float(value) for value in found.groups()]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--width", type=int, default=832)
    args = parser.parse_args()
    python, site = python_path()
    root = tempfile.mkdtemp(prefix="lockstep-bench-trainer-")
    try:
        lockstep, lightning = [], []
        for turn in range(args.turns):
            words = [str(args.steps), str(args.width), root]
            lockstep.append(on_a_terminal([args.program, *words]))
            lightning.append(on_a_terminal([python, "-c", LIGHTNING_PROGRAM, *words], site))
            for name, values in (("Lockstep", lockstep), ("Lightning", lightning)):
                plain, trainer, added = values[-1]
                print(
                    f"turn {turn}: {name}: plain loop {plain:.3f} ms, trainer {trainer:.3f} ms, {100 * added:+.2f} %",
                    flush=True,
                )
        for name, values in (("Lockstep's Trainer", lockstep), ("Lightning's", lightning)):
            added = statistics.median(v[2] for v in values)
            added_ms = statistics.median(v[1] - v[0] for v in values)
            step_ms = statistics.median(v[0] for v in values)
            print(f"{name} adds {100 * added:+.2f} % ({1e3 * added_ms:+.0f} us) to a step of {step_ms:.2f} ms")
        return 0
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
