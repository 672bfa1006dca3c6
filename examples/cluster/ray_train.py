"""Trains with Ray Train: each worker of TorchTrainer is a rank of Lockstep.

python ray_train.py --workers 4 [--gpus]
"""

import argparse

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

import lockstep


# docs: begin train
def train(options):
    world = lockstep.init()  # the ranks are the workers of the trainer
    torch.manual_seed(world.rank)  # each rank has data of its own; the model is that of rank 0
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(world.device)
    ddp = lockstep.DistributedDataParallel(net, world)
    optimizer = lockstep.optim.AdamW(ddp, lr=0.01)
    for step in range(options["steps"]):
        x = torch.randn(64, 8, device=world.device)
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if world.rank == 0 and step % 50 == 0:
            print(f"step {step} of {world.size} workers: loss {loss.item():.3f}", flush=True)
    # docs: end train


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="processes, on all nodes of Ray together")
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    options = parser.parse_args()
    # docs: begin trainer
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": options.steps},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
    )
    trainer.fit()
    # docs: end trainer


if __name__ == "__main__":
    main()
