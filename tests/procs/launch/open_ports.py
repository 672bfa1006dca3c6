#!/usr/bin/env python3
"""Lists the ports on which Python jobs of one host listen; none may be open to other hosts. And opens a thousand
connections of strangers to a rank that makes a group over TCP and waits for the other one.

Usage: open_ports.py --lockstep PATH --hook FOLDER --package FOLDER --python PATH
The jobs use the package, torch.distributed over Gloo and over Lockstep, and a store of torch that the program makes.
"""

import argparse
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
from strangers import Attack, listeners  # noqa: E402
from tagged_processes import find_tagged  # noqa: E402

MARK = "LOCKSTEP_TEST_OPEN_PORTS"
RANKS = 2
PROGRAM = """
import os, pathlib, sys, time
kind, folder = sys.argv[1], pathlib.Path(sys.argv[2])
if kind == "package":
    import lockstep
    world = lockstep.init()
    world.barrier()
else:
    import torch, torch.distributed as dist
    if kind == "lockstep":
        import _lockstep_backend
        _lockstep_backend.register()
    store = None
    if kind == "own store":
        rank = int(os.environ["RANK"])
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, rank == 0)
    dist.init_process_group("gloo" if kind == "own store" else kind, store=store, **(
        {"rank": rank, "world_size": 2} if store else {}))
    dist.all_reduce(torch.ones(3))
    if len(sys.argv) > 3:  # rank 0 makes a group first
        if os.environ["RANK"] == "1":
            (folder / "port").write_text(os.environ["MASTER_PORT"])
            (folder / "port").rename(folder / "joined")
        while os.environ["RANK"] == "1" and not (folder / "late").exists():
            time.sleep(0.01)
        ones = torch.ones(100_000)
        dist.all_reduce(ones, group=dist.new_group())
        assert ones.eq(2).all()
(folder / os.environ["RANK"]).touch()
end = time.monotonic() + 30
while not (folder / "end").exists() and time.monotonic() < end:
    time.sleep(0.01)
"""


def start(args, folder, mark, *words, **more):
    (folder / "program.py").write_text(PROGRAM)
    paths = [args.package, f"{args.hook}/path"]
    env = {**os.environ, MARK: mark, "PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1", **more}
    env.pop("GLOO_SOCKET_IFNAME", None)
    return subprocess.Popen(
        [args.lockstep, "run", "-n", str(RANKS), "--bind", "none", args.python, folder / "program.py", *words],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def look(args, kind, folder):
    """Returns [(whether it is a rank, address)] of the listeners of a job of this kind, its exit code and its text."""
    folder = pathlib.Path(folder)
    mark = f"{os.getpid()}.{kind}"
    job = start(args, folder, mark, kind, folder)
    end = time.monotonic() + 60
    while job.poll() is None and not all((folder / str(rank)).exists() for rank in range(RANKS)):
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    found = [(pid != job.pid, address) for pid, address, _ in listeners(find_tagged(MARK, mark))]
    (folder / "end").touch()
    text, _ = job.communicate(timeout=240)
    return found, job.returncode, text


def attack(args, folder):
    """Returns what is wrong after an attack on the connections of a group."""
    folder, mark = pathlib.Path(folder), f"{os.getpid()}.attack"
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"attack with seed {seed}", flush=True)
    strangers = Attack(random.Random(seed))
    job = start(args, folder, mark, "lockstep", folder, "group", LOCKSTEP_TRANSPORT="tcp")
    end = time.monotonic() + 60

    def find_ports():  # of the group that rank 0 makes: without those of the launcher and of torch's store
        found = listeners(find_tagged(MARK, mark))
        return [port for pid, _, port in found if pid != job.pid and port != store]

    while not (folder / "joined").exists() and job.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    if not (folder / "joined").exists():
        job.kill()
        return [f"the job has not started: {job.communicate(timeout=240)[0][-2000:]}"]
    store = int((folder / "joined").read_text())
    while not find_ports() and job.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    strangers.run(find_ports, 1000, time.monotonic() + 2)
    attacked = find_ports()
    (folder / "late").touch()
    strangers.run(find_ports, 100, time.monotonic() + 0.2)
    (folder / "end").touch()
    text, _ = job.communicate(timeout=240)
    strangers.end()
    wrong = list(strangers.answered)
    if not attacked:
        wrong.append("rank 0 did not listen")
    if strangers.opened < 500:
        wrong.append(f"only {strangers.opened} of 1100 connections were opened")
    if job.returncode != 0:
        wrong.append(f"exit code {job.returncode}: {text[-2000:]}")
    return wrong


def main():
    parser = argparse.ArgumentParser()
    for name in ("lockstep", "hook", "package", "python"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    wrong = []
    # The listeners of all ranks: torch's store in rank 0, and one of Gloo in each.
    for kind, expected in (("package", 0), ("lockstep", 1), ("gloo", 1 + RANKS), ("own store", 1 + RANKS)):
        with tempfile.TemporaryDirectory() as folder:
            found, code, text = look(args, kind, folder)
        of_ranks = [address for is_rank, address in found if is_rank]
        print(f"{kind}: launcher {len(found) - len(of_ranks)}, ranks {of_ranks}, code {code}", flush=True)
        if code != 0:
            wrong.append(f"{kind}: exit code {code}: {text[-2000:]}")
        if {address for _, address in found} != {"127.0.0.1"} or len(of_ranks) != expected:
            wrong.append(f"{kind}: {found}; expected {expected} listeners of ranks, all on 127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        wrong += attack(args, folder)
    if wrong:
        sys.exit("\n".join(wrong))


main()
