"""Runs the training of bench/checkpoint_save.cc with PyTorch's DistributedDataParallel over Gloo.

Usage: checkpoint_save.py async|sync WIDTH LAYERS ROWS ROUNDS FOLDER. async saves with
torch.distributed.checkpoint.async_save, sync with torch.save on rank 0 while the other ranks wait in the next step.
"""

import json
import os
import shutil
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

STEPS_WITHOUT, STEPS_WITH, SAVE_EVERY = 10, 20, 10


def main():
    mode = sys.argv[1]
    width, layers, rows, rounds = map(int, sys.argv[2:6])
    folder = sys.argv[6]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        *(layer for _ in range(layers) for layer in (torch.nn.Linear(width, width), torch.nn.Tanh()))
    )
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
    torch.manual_seed(2 + rank)
    data = torch.randn(rows, width)
    in_flight = None
    saving = dist.new_group(backend="gloo")  # used only by the saving thread, separate from the gradients

    def step():
        optimizer.zero_grad()
        ddp(data).pow(2).mean().backward()
        optimizer.step()

    def save(number):
        nonlocal in_flight
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        if mode == "sync":
            if rank == 0:
                torch.save(state, f"{folder}/{number}.pt")
        else:
            if in_flight is not None:
                in_flight.result()
            in_flight = dcp.async_save(state, checkpoint_id=f"{folder}/{number}", process_group=saving)

    def finished(numbers):
        nonlocal in_flight
        if in_flight is not None:
            in_flight.result()
            in_flight = None
        dist.barrier()
        if rank == 0:
            for number in numbers:
                shutil.rmtree(f"{folder}/{number}", ignore_errors=True)
                if os.path.exists(f"{folder}/{number}.pt"):
                    os.remove(f"{folder}/{number}.pt")

    steps, steps_saving, stalls = [], [], []
    for _ in range(3):
        step()
    for round_number in range(rounds):
        numbers = []
        for i in range(STEPS_WITHOUT + STEPS_WITH):
            begin = time.perf_counter()
            step()
            if i >= STEPS_WITHOUT and i % SAVE_EVERY == 0:
                save_begin = time.perf_counter()
                numbers.append(round_number * 100 + i)
                save(numbers[-1])
                stalls.append(time.perf_counter() - save_begin)
            (steps if i < STEPS_WITHOUT else steps_saving).append(time.perf_counter() - begin)
        finished(numbers)
    longest = torch.tensor(stalls, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    if rank == 0:
        ms = lambda values: round(1e3 * statistics.median(values), 2)
        print(
            json.dumps(
                {
                    "peer": mode,
                    "step": ms(steps),
                    "step_saving": ms(steps_saving),
                    "stall": ms(longest.tolist()),
                    "first_stall": round(1e3 * longest[0].item(), 2),
                }
            )
        )
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # with the saving thread, destroy_process_group() sometimes does not return


main()
