"""The step of bench/step.cc with PyTorch's DistributedDataParallel over gloo, in Python."""
import json
import os
import sys
import time

import torch
import torch.distributed as dist

MODELS = {"mlp-6m": (1024, 6, 64), "mlp-50m": (4096, 3, 16)}


def main():
    views, model, turns = sys.argv[1] == "views", sys.argv[2], sys.argv[3]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    width, layers, batch = MODELS[model]
    torch.manual_seed(1)
    parts = []
    for i in range(layers):
        parts.append(torch.nn.Linear(width, width))
        if i + 1 < layers:
            parts.append(torch.nn.ReLU())
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*parts), gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    x, y = torch.randn(batch, width), torch.randn(batch, width)
    for line in open(f"{turns}.{dist.get_rank()}"):
        seconds = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            seconds.append(round(time.perf_counter() - begin, 6))
        if dist.get_rank() == 0:
            print(json.dumps({"impl": "pytorch-views" if views else "pytorch", "model": model, "seconds": seconds}), flush=True)
    dist.destroy_process_group()


main()
