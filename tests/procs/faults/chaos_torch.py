#!/usr/bin/env python3
"""Measures the faults of chaos.py with PyTorch's DistributedDataParallel over Gloo under torchrun, with its defaults.

Usage: chaos_torch.py --python PYTHON [--ranks N] [--limit S] [--only NAME,...]
PYTHON must have torch. Prints for each fault how long the job took to end, and its messages; it does not judge them.
A run that has not ended after the limit is killed, by process ID.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
from tagged_processes import kill_tagged  # noqa: E402

MARK = "LOCKSTEP_TEST_CHAOS_TORCH"
STEP = 60
FAULTS = ("kill", "stop", "loop", "throw", "segv", "skip", "extra", "shape", "dtype", "flip")


def rank_main(folder, fault, victim):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    for step in range(400):
        wrong = fault if rank == victim and step == STEP else ""
        if wrong:
            pathlib.Path(folder, "fault").write_text(str(os.getpid()))
        if wrong == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if wrong == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if wrong == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        while wrong == "loop":
            pass
        if wrong == "throw":
            raise RuntimeError("no such thing")
        time.sleep(0.003)
        optimizer.zero_grad()
        ddp(torch.randn(8, 32)).pow(2).mean().backward()
        if wrong == "flip":
            next(net.parameters()).grad.view(-1)[0] *= 1.5
        optimizer.step()
        votes = torch.full(
            (65 if wrong == "shape" else 64,), 1.0 + rank, dtype=torch.double if wrong == "dtype" else torch.float
        )
        if wrong == "extra":
            dist.barrier()
        if wrong != "skip":
            dist.all_reduce(votes)
    print("finished", flush=True)
    dist.destroy_process_group()


def run_fault(args, fault):
    """Runs one job. Returns how long it took to end after the fault, and its messages."""
    mark = f"{os.getpid()}.{fault}"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            args.python,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={args.ranks}",
            "--master-port=0",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0",
            os.path.abspath(__file__),
            "--as-rank",
            folder,
            fault,
            "1",
        ]
        env = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        job = subprocess.Popen(
            command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        begin = None
        text = ""
        try:
            limit = time.monotonic() + 60
            while begin is None and time.monotonic() < limit and job.poll() is None:
                if pathlib.Path(folder, "fault").exists():
                    begin = time.monotonic()
                time.sleep(0.01)
            begin = begin or time.monotonic()
            try:
                text, _ = job.communicate(timeout=args.limit)
                took = f"{time.monotonic() - begin:7.1f} s, exit code {job.returncode}"
            except subprocess.TimeoutExpired:
                took = f"more than {args.limit:.0f} s"
        finally:
            kill_tagged(MARK, mark)
            rest, _ = job.communicate()
            text = text or rest
        messages = [
            line.strip()
            for line in text.splitlines()
            if any(word in line for word in ("Error", "error", "finished", "Signal", "exitcode"))
        ]
        return took, messages


def main():
    if sys.argv[1:2] == ["--as-rank"]:
        return rank_main(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True, type=os.path.abspath)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--limit", type=float, default=60)
    parser.add_argument("--only", default=",".join(FAULTS))
    args = parser.parse_args()
    for fault in args.only.split(","):
        took, messages = run_fault(args, fault)
        print(f"{fault:6} {took}", flush=True)
        for line in list(dict.fromkeys(messages))[:6]:
            print(f"         {line[:200]}", flush=True)


main()
