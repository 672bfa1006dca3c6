"""The step of bench/step.cc with PyTorch's DistributedDataParallel over gloo, in Python."""
import json
import os
import sys
import time

import torch
import torch.distributed as dist

MODELS = {"mlp-6m": (1024, 6, 64), "mlp-50m": (4096, 3, 16)}


def main():
    views, model, steps = sys.argv[1] == "views", sys.argv[2], int(sys.argv[3])
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
    seconds = []
    for step in range(steps + 5):
        begin = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        if step >= 5:
            seconds.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        seconds.sort()
        name = "pytorch-views" if views else "pytorch"
        print(json.dumps({"what": "step", "impl": name, "model": model, "median_s": round(seconds[len(seconds) // 2], 6),
                          "min_s": round(seconds[0], 6), "runs": steps}), flush=True)
    dist.destroy_process_group()


main()
