"""Runs the step of bench/ranks/step.cc from Python.

Usage: python_step.py KIND MODEL sgd|adamw PREFIX. KIND is one of
  ddp           PyTorch's DistributedDataParallel over Gloo and torch.optim
  ddp-views     the same with gradient_as_bucket_view
  ddp-best      the same with static_graph as well, and an optimizer with fused=True
  backend       ddp over the backend "lockstep" of torch.distributed
  lockstep      Lockstep's DistributedDataParallel and torch.optim
  lockstep-fused  the same with lockstep.optim

Serves requests as described in bench/harness/benchmark_job.h.
"""

import contextlib
import os
import sys
import time

import torch
from models import make_task


def torch_optimizer(net, name, **options):
    if name == "sgd":
        return torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, **options)
    return torch.optim.AdamW(net.parameters(), 1e-4, **options)


def make_ddp(kind, model, optimizer_name):
    import torch.distributed as dist

    if kind == "backend":
        import _lockstep_backend  # an installed wheel registers it by itself

        _lockstep_backend.register()
    dist.init_process_group("lockstep" if kind == "backend" else "gloo")
    task = make_task(model)
    best = kind == "ddp-best"
    net = torch.nn.parallel.DistributedDataParallel(
        task[0], gradient_as_bucket_view=kind in ("ddp-views", "ddp-best"), static_graph=best
    )
    optimizer = torch_optimizer(net, optimizer_name, **({"fused": True} if best else {}))
    return dist.get_rank(), (net, *task[1:]), optimizer, dist.destroy_process_group


def make_lockstep(kind, model, optimizer_name):
    import lockstep

    world = lockstep.init()
    task = make_task(model)
    ddp = lockstep.DistributedDataParallel(task[0], world)
    if kind == "lockstep":
        optimizer = torch_optimizer(task[0], optimizer_name)
    elif optimizer_name == "sgd":
        optimizer = lockstep.optim.SGD(ddp, 0.01, momentum=0.9)
    else:
        optimizer = lockstep.optim.AdamW(ddp, 1e-4)
    return world.rank, task, optimizer, lambda: None


def main():
    kind, model, optimizer_name, prefix = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    make = make_lockstep if kind.startswith("lockstep") else make_ddp
    rank, (net, x, loss), optimizer, end = make(kind, model, optimizer_name)
    with open(f"{prefix}.{rank}.pid", "w") as file:
        file.write(str(os.getpid()))

    def step():
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss(net(x)).backward()
        optimizer.step()
        return time.perf_counter() - begin

    with contextlib.ExitStack() as files:
        requests = files.enter_context(open(f"{prefix}.{rank}"))
        results = files.enter_context(open(f"{prefix}.answers" if rank == 0 else os.devnull, "w"))
        print(sum(parameter.numel() for parameter in net.parameters()), file=results, flush=True)
        for line in requests:
            warm_up, measured = map(int, line.split())
            seconds = [step() for _ in range(warm_up + measured)][warm_up:]
            print(*(f"{second:.9g}" for second in seconds), file=results, flush=True)
    end()


main()
