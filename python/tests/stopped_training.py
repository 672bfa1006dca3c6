"""A training that is asked to stop while workers of its DataLoader and another child are busy."""

import multiprocessing
import subprocess
import sys
import time

import torch

import lockstep


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 100000

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((4,), float(index % 7))


def train(folder):
    world = lockstep.init()
    helper = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    net = torch.nn.Linear(4, 1)
    ddp = lockstep.DistributedDataParallel(net, world)
    loader = lockstep.data.DataLoader(Slow(), world, batch_size=2, num_workers=2)
    for step, batch in enumerate(loader.epoch(0)):
        net.zero_grad()
        net(batch).sum().backward()
        stops = world.stop_requested()
        if step == 5:
            print("ready", flush=True)
        if step > 5 and stops:
            next(iter(loader.epoch(1)))  # new workers
            helper.stdin.write(b"weights\n")
            helper.stdin.flush()
            assert helper.stdout.readline() == b"weights\n"
            with open(f"{folder}/{world.rank}", "w") as file:
                file.write(str(step))
            sys.exit(lockstep.PREEMPTED)
    del ddp


def terminate_children():
    """Each child must end by the signal, also if it gets it as soon as it exists."""
    world = lockstep.init()
    world.stop_requested()
    context = multiprocessing.get_context("fork")
    for _ in range(20):
        child = context.Process(target=time.sleep, args=(1000,))
        child.start()
        child.terminate()
        child.join()
    with context.Pool(2) as pool:  # its end calls terminate()
        next(pool.imap_unordered(time.sleep, [0.001] * 50))
    context.Process(target=time.sleep, args=(1000,), daemon=True).start()  # the end of the interpreter terminates it


if __name__ == "__main__":
    train(sys.argv[2]) if sys.argv[1] == "train" else terminate_children()
