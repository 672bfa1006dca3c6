"""A program that uses torch.distributed and not Lockstep.

Usage: torch_program.py WHAT SECONDS [--address HOST:PORT] [--device cuda] [--backend NAME] [--group NAME] [--pending]
All ranks make some steps. Then the last rank does WHAT while the others wait for it: in the default group, or in one
beside it of the backend that --group names. --pending: each rank has operations pending, that the last rank does not
wait for."""

import argparse
import http.client
import importlib.util
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
PARSER.add_argument("--backend", default="gloo")
PARSER.add_argument("--group")
PARSER.add_argument("--pending", action="store_true")
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
    if WHAT in ("sleep", "backward", "barrier", "recv", "spinning", "async", "store", "init", "left"):
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
    elif WHAT == "finally":
        try:
            raise LookupError("sample 1234 has no label")
        finally:
            dist.all_reduce(torch.ones(7), group=GROUP)
    elif WHAT == "desync":
        dist.all_reduce(torch.ones(7), group=GROUP)
    elif WHAT == "save":
        while time.monotonic() < end:
            torch.save(torch.ones(200_000), "saved.pt")
            time.sleep(0.1)
    elif WHAT == "download":  # slowly, to memory
        connection = http.client.HTTPConnection(ARGS.address)
        connection.request("GET", "/")
        connection.getresponse().read()


def main():
    global GROUP
    if importlib.util.find_spec("_lockstep_backend"):  # which an installed package registers by itself
        import _lockstep_backend

        _lockstep_backend.register()
    if WHAT == "init" and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        misbehave()
    dist.init_process_group("nccl" if ARGS.device == "cuda" else ARGS.backend)
    GROUP = dist.new_group(backend=ARGS.group) if ARGS.group else None
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100).to(ARGS.device))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        net(torch.ones(3, 100, device=ARGS.device)).sum().backward()
        optimizer.step()

    for _ in range(5):
        step()
    store = dist.distributed_c10d._get_default_store()
    if ARGS.pending:
        pending = [dist.irecv(torch.ones(3), (rank + 1) % (last + 1)), dist.all_reduce(torch.ones(3), async_op=True)]
    if WHAT == "left":
        dist.destroy_process_group()
    if rank == last:
        misbehave()
    elif WHAT in ("spinning", "async"):  # as a rank that waits for NCCL uses its core
        threading.Thread(target=spin, args=(time.monotonic() + SECONDS,), daemon=True).start()
    if WHAT == "straggler":
        for _ in range(int(SECONDS / 0.2)):
            time.sleep(0.2 if rank == last else 0.01)
            step()
    if WHAT == "recv":
        if rank == 0:
            dist.recv(torch.ones(3, device=ARGS.device), last, group=GROUP)
    elif WHAT == "backward":
        step()
    elif WHAT == "async":
        dist.all_reduce(torch.ones(3, device=ARGS.device), group=GROUP, async_op=True).wait()
    elif WHAT == "store":
        store.wait(["a key"])
    elif WHAT != "left":
        dist.barrier(group=GROUP)
    if ARGS.pending:
        dist.send(torch.ones(3), (rank - 1) % (last + 1))
        for work in pending:
            work.wait()
    if WHAT != "left":
        dist.destroy_process_group()
    print("finished", flush=True)


main()
