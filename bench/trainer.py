#!/usr/bin/env python3
"""What a trainer adds to a step: Lockstep's fit() beside a plain loop in C++, and Lightning's beside a plain loop in Python, of the same model: blocks of 20 steps in turns inside each process, and the two processes in turns.

usage: trainer.py --program bench_trainer [--turns N] [--steps N] [--width N]
Both have their progress line on a terminal (a pseudo-terminal here), files of values for TensorBoard and as CSV, and no checkpoints while it is measured. One thread of torch each. Python's part is what scripts/setup.sh --beds and --peers install: .deps/python,
.deps/tensorboard, .deps/peers/lightning.
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

CHILD = r"""
import sys, time, torch, logging, warnings
warnings.filterwarnings("ignore"); logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
import pytorch_lightning as pl
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
steps, width, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
WARM, BLOCK, BATCH = 100, 20, 64
torch.set_num_threads(1)

def net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(256, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))

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

class Turns(pl.Callback):
    "After each block of the trainer's steps it runs as many of the plain loop."
    def __init__(self):
        self.model = net(); self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01); self.batches = iter(loader()); self.trainer_ms, self.plain_ms = [], []
    def on_train_batch_end(self, trainer, *rest):
        if trainer.global_step % BLOCK: return
        now = time.perf_counter()
        for _ in range(BLOCK):
            x, y = next(self.batches)
            self.optimizer.zero_grad(); torch.nn.functional.cross_entropy(self.model(x), y).backward(); self.optimizer.step()
        end = time.perf_counter()
        if trainer.global_step > WARM:
            self.trainer_ms.append(1e3 * (now - self.begin) / BLOCK); self.plain_ms.append(1e3 * (end - now) / BLOCK)
        self.begin = end

turns = Turns()
trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=steps, callbacks=[turns], logger=[CSVLogger(folder), TensorBoardLogger(folder)], enable_checkpointing=False, enable_model_summary=False)
trainer.fit(Module(), loader())
mid = lambda v: sorted(v)[len(v) // 2]
print(f"plain_ms={mid(turns.plain_ms):.4f} trainer_ms={mid(turns.trainer_ms):.4f} added={mid([t / p for t, p in zip(turns.trainer_ms, turns.plain_ms)]) - 1:.5f}", flush=True)
"""


def python_path():
    """torch's Python, and where Lightning and TensorBoard lie."""
    deps = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ".deps")
    sites = [
        site
        for folder in ("peers/lightning", "tensorboard")
        for site in glob.glob(os.path.join(deps, folder, "lib/python3*/site-packages"))
    ]
    if len(sites) < 2:
        raise SystemExit(
            "Lightning or TensorBoard is not there: scripts/setup.sh --beds, then scripts/setup.sh --peers"
        )
    return os.path.join(deps, "python/bin/python3"), ":".join(sites)


def on_a_terminal(command, site=""):
    """Its output, when stdout and stderr are a terminal of 100 columns."""
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
        raise SystemExit(f"{command[0]} ended with {process.returncode}\n{text.decode(errors='replace')[-2000:]}")
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
        ours, theirs = [], []
        for turn in range(args.turns):
            words = [str(args.steps), str(args.width), root]
            ours.append(on_a_terminal([args.program, *words]))
            theirs.append(on_a_terminal([python, "-c", CHILD, *words], site))
            for name, values in (("Lockstep", ours), ("Lightning", theirs)):
                plain, trainer, added = values[-1]
                print(
                    f"turn {turn}: {name}: plain loop {plain:.3f} ms, trainer {trainer:.3f} ms, {100 * added:+.2f} %",
                    flush=True,
                )
        for name, values in (("Lockstep's Trainer", ours), ("Lightning's", theirs)):
            print(
                f"{name} adds {100 * statistics.median(v[2] for v in values):+.2f} % ({1e3 * statistics.median(v[1] - v[0] for v in values):+.0f} us) to a step of {statistics.median(v[0] for v in values):.2f} ms"
            )
        return 0
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
