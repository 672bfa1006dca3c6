"""A training on all ranks of which one fails in step 3, as the first argument says."""

import atexit
import os
import signal
import sys
import time

import torch

import lockstep


class Unreadable(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise LookupError(f"no such sample: {index}")


def fail(how, world):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "loop":
        time.sleep(600)
    elif how in ("desync", "handler"):
        world.all_reduce(torch.ones(3), name="accuracy")
    elif how == "exception":
        raise LookupError("no such batch")
    elif how == "finally":
        try:
            raise LookupError("no such batch")
        finally:
            world.barrier()
    elif how == "worker":
        next(iter(torch.utils.data.DataLoader(Unreadable(), num_workers=1)))
    elif how == "known":
        raise RuntimeError("CUDA out of memory, or something else: No space left on device")
    elif how == "memory":
        torch.empty(1 << 55)
    elif how == "slow_end":
        atexit.register(time.sleep, 60)
        raise LookupError("no such batch")
    elif how in ("exit", "slow_exit"):
        sys.exit(3)
    elif how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)


def main():
    how, failing = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    if how == "slow_exit":
        atexit.register(time.sleep, 7)  # before init(), so that it runs once the rank has left
    world = lockstep.init()
    net = torch.nn.Linear(4, 2)
    ddp = lockstep.DistributedDataParallel(net, world)
    optimizer = lockstep.optim.AdamW(ddp, lr=0.1) if sys.argv[3] == "fused" else torch.optim.AdamW(net.parameters())
    for step in range(10):
        if step == 3 and world.rank == failing:
            fail(how, world)
        optimizer.zero_grad()
        net(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    print("trained to the end")


if __name__ == "__main__":
    if sys.argv[1] == "handler":  # all ranks train in the block that handles an error
        try:
            open("/nowhere/checkpoint.pt")
        except FileNotFoundError:
            main()
    else:
        main()
