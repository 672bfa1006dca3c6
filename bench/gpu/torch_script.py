"""A script of torch.distributed for the stage torch of the GPU proof, over the backend "lockstep".

Usage: torch_script.py ddp|fsdp|checkpoint cuda|cpu, started by lockstep run. Rank 0 prints the losses, and those of the
same model without ranks, as JSON.
"""

import copy
import json
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 5


def train(model, batches):
    """Returns the losses of the steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def save_and_load(model, other):
    """Saves the state of `model` from all ranks, and loads it into `other`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder, 0)
        dcp.save(get_model_state_dict(model), checkpoint_id=folder[0])
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=folder[0])
        dist.barrier()


def main():
    mode, kind = sys.argv[1:]
    import _lockstep_backend  # an installed wheel registers it by itself

    _lockstep_backend.register()
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    dist.init_process_group("lockstep")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).to(device)
    alone = copy.deepcopy(model)
    inputs = torch.randn(STEPS, size, 16, 64).to(device)
    if mode == "ddp":
        parallel = nn.parallel.DistributedDataParallel(model)
    else:
        other = fully_shard(copy.deepcopy(model), mesh=(mesh := init_device_mesh(kind, (size,))))
        parallel = fully_shard(model, mesh=mesh)
    losses = train(parallel, inputs[:, rank])
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    answer = {"losses": losses.tolist(), "alone": train(alone, inputs.flatten(1, 2)).tolist(), "ranks": size}
    if mode == "checkpoint":
        save_and_load(model, other)
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        answer["same"] = all(torch.equal(one.full_tensor(), two.full_tensor()) for one, two in pairs)
    if rank == 0:
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
