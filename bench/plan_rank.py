"""A rank of bench/plan.py: trains a model by a method, for each number of steps in turn, and prints how long they take.

argv: the case as JSON: model, method, every, runs (the numbers of steps). Without "runs" it trains until it is killed.
"""

import itertools
import json
import sys
import time

import slow_networks_rank
import torch
from torch import nn

import lockstep

WARM = 2  # steps of each run that are not measured
DENSE = 10  # the first steps of PowerSGD, which send gradients as they are


def gpt(width):
    model = slow_networks_rank.Gpt(65, width, 4)
    ids = torch.randint(65, (8, slow_networks_rank.BLOCK + 1))
    return model, lambda: nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def cnn():
    model = slow_networks_rank.Digits.make_model()
    images, labels = torch.randn(128, 1, 28, 28), torch.randint(10, (128,))
    return model, lambda: nn.functional.cross_entropy(model(images), labels)


def mlp():
    model = nn.Sequential(*itertools.chain(*((nn.Linear(1440, 1440), nn.ReLU()) for _ in range(5))))
    rows = torch.randn(128, 1440)
    return model, lambda: model(rows).square().mean()


MODELS = {"gpt-0.8m": lambda: gpt(128), "gpt-3m": lambda: gpt(256), "cnn-1m": cnn, "mlp-10m": mlp}
METHODS = {
    "float32": {},
    "bfloat16": {"wire_dtype": torch.bfloat16},
    "int8": {"hook": lockstep.Int8()},
    "PowerSGD": {"hook": lockstep.PowerSGD(4)},
    "DiLoCo": {"outer": lockstep.DiLoCo(payload="int8")},
}


def main():
    case = json.loads(sys.argv[1])
    torch.manual_seed(1)
    world = lockstep.init()
    model, loss = MODELS[case["model"]]()
    options = METHODS[case["method"]]
    if "outer" in options:
        options["average_hosts_every"] = case["every"]
    ddp = lockstep.DistributedDataParallel(model, world, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    while "runs" not in case:
        step()
    warm = case["every"] if "outer" in options else WARM + DENSE if case["method"] == "PowerSGD" else WARM
    if world.rank == 0:
        print("ready", flush=True)
    for steps in case["runs"]:
        if world.rank == 0:
            sys.stdin.readline()
        for _ in range(warm):  # after the first step of the next interval, its round is complete
            step()
        world.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        world.barrier()
        if world.rank == 0:
            print(json.dumps({"step_s": (time.perf_counter() - begin) / steps}), flush=True)
    del ddp


main()
