"""A training on all ranks of which one fails in step 3, as the first argument says."""

import os
import signal
import sys
import time

import torch

import lockstep


def fail(how, world):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "loop":
        time.sleep(600)
    elif how == "desync":
        world.all_reduce(torch.ones(3), name="accuracy")
    elif how == "exception":
        raise LookupError("no such batch")
    elif how == "exit":
        sys.exit(3)
    elif how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)


def main():
    how, failing = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
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
    main()
