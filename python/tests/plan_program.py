"""A training for test_plan.py. argv: package, fused, torch, gan or state; the file of weights; the number of steps."""

import os
import sys

import torch
from torch import nn

kind, weights, steps = sys.argv[1:]
if kind == "torch":
    torch.distributed.init_process_group("gloo")
else:
    import lockstep

    world = lockstep.init()
torch.manual_seed(1)
if os.path.exists("data/rows.pt"):
    rows = torch.load("data/rows.pt")
nets = [nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(2 if kind == "gan" else 1)]
if kind == "torch":
    called = [nn.parallel.DistributedDataParallel(net) for net in nets]
else:
    ddps = [lockstep.DistributedDataParallel(net, world) for net in nets]
    called = nets
if kind == "fused":
    optimizers = [lockstep.optim.AdamW(ddp, lr=1e-3) for ddp in ddps]
else:
    optimizers = [torch.optim.AdamW(net.parameters()) for net in nets]
if kind == "state":
    state = lockstep.checkpoint.TrainingState(world, "checkpoints").add("net", nets[0])
    resumed = state.resume()
    print("resumed", resumed, flush=True)
    if resumed and "LOCKSTEP_PROFILE" in os.environ:
        sys.exit("resumed under lockstep plan")
for step in range(int(steps)):
    for net, optimizer in zip(called, optimizers):
        optimizer.zero_grad()
        net(rows).square().mean().backward()
        optimizer.step()
    if step == 3:
        torch.save(nets[0].state_dict(), weights)
        if kind == "state":
            state.save(step)
