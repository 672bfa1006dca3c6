"""A program that uses torch.distributed and not Lockstep.

Usage: torch_program.py WHAT SECONDS [--address HOST:PORT] [--device cuda]
All ranks make some steps. Then the last rank does WHAT while the others wait for it."""

import argparse
import http.client
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

PARSER = argparse.ArgumentParser()
PARSER.add_argument("what")
PARSER.add_argument("seconds", type=float)
PARSER.add_argument("--address")
PARSER.add_argument("--device", default="cpu")
ARGS = PARSER.parse_args()
WHAT, SECONDS = ARGS.what, ARGS.seconds


class Stuck(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(SECONDS)
        return index


def spin(until):
    while time.monotonic() < until:
        pass


def misbehave():
    pathlib.Path("begun").write_text(str(time.monotonic()))
    end = time.monotonic() + SECONDS
    if WHAT in ("sleep", "backward", "barrier", "recv", "spinning"):
        time.sleep(SECONDS)
    elif WHAT == "loop":
        spin(end)
    elif WHAT == "worker":
        next(iter(DataLoader(Stuck(), num_workers=1)))
    elif WHAT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif WHAT == "evaluate":
        value = torch.ones(200, 200)
        while time.monotonic() < end:
            value = value @ value / 200
    elif WHAT == "compile":  # as torch.compile does, in another process
        spinning = f"import time\nend = time.monotonic() + {SECONDS}\nwhile time.monotonic() < end: pass"
        subprocess.run([sys.executable, "-c", spinning], check=True)
    elif WHAT == "download":  # slowly, to memory
        connection = http.client.HTTPConnection(ARGS.address)
        connection.request("GET", "/")
        connection.getresponse().read()


def main():
    dist.init_process_group("nccl" if ARGS.device == "cuda" else "gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100).to(ARGS.device))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        net(torch.ones(3, 100, device=ARGS.device)).sum().backward()
        optimizer.step()

    for _ in range(5):
        step()
    if rank == last:
        misbehave()
    elif WHAT == "spinning":  # as a rank that waits for NCCL uses its core
        threading.Thread(target=spin, args=(time.monotonic() + SECONDS,), daemon=True).start()
    if WHAT == "straggler":
        for _ in range(int(SECONDS / 0.2)):
            time.sleep(0.2 if rank == last else 0.01)
            step()
    if WHAT == "recv":
        if rank == 0:
            dist.recv(torch.ones(3, device=ARGS.device), last)
    elif WHAT == "backward":
        step()
    else:
        dist.barrier()
    dist.destroy_process_group()
    print("finished", flush=True)


main()
