"""Runs the step of bench/ranks/step.cc with PyTorch's DistributedDataParallel over Gloo.

Usage: ddp_step.py copies|views MODEL sgd|adamw PREFIX. Serves requests as described in bench/harness/benchmark_job.h.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from models import make_task

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-4),
}


def main():
    bucket_mode, model, optimizer_name, prefix = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net, x, loss = make_task(model)
    net = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=bucket_mode == "views")
    optimizer = OPTIMIZERS[optimizer_name](net.parameters())
    with open(f"{prefix}.{rank}.pid", "w") as file:
        file.write(str(os.getpid()))

    def step():
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss(net(x)).backward()
        optimizer.step()
        return time.perf_counter() - begin

    requests = open(f"{prefix}.{rank}")
    results = open(f"{prefix}.answers", "w") if rank == 0 else open(os.devnull, "w")
    print(sum(parameter.numel() for parameter in net.parameters()), file=results, flush=True)
    for line in requests:
        warm_up, measured = map(int, line.split())
        seconds = [step() for _ in range(warm_up + measured)][warm_up:]
        print(*(f"{second:.9g}" for second in seconds), file=results, flush=True)
    dist.destroy_process_group()


main()
