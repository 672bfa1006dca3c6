"""Scripts for the stage torch of the GPU proof, started by lockstep run.

Usage: torch_script.py MODE cuda|cpu. Each rank prints the losses, and those of the same
model without ranks, as JSON. MODE:
  ddp, fsdp, checkpoint   torch's DistributedDataParallel, FSDP and its checkpoints over the backend "lockstep"
  groups                  the same over process groups that are split from the default one and aborted
  own, own-fused          lockstep.DistributedDataParallel with torch.optim, and with lockstep.optim
  own-amp                 the latter with autocast to float16 and a GradScaler
  desync                  the ranks call different operations of the backend: an error is expected
  absent                  rank 1 sleeps, the other waits for it: lockstep run is expected to end the job
  steps                   DistributedDataParallel over NCCL or Gloo, without Lockstep: milliseconds of a step, as JSON
  capture                 a CUDA graph with an all_reduce, captured and replayed for longer than --hang-timeout
"""

import copy
import json
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 5


def make_model(device):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).to(device)


def train(model, batches, optimizer=None, amp=False):
    """Returns the losses of the steps."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kind = batches.device.type
    scaler = torch.amp.GradScaler(kind, init_scale=1024, enabled=amp)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast(kind, torch.float16, enabled=amp):
            loss = model(batch).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
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


def join(device, **options):
    """Makes the default process group, over the backend "lockstep"."""
    import _lockstep_backend  # an installed wheel registers it by itself

    _lockstep_backend.register()
    dist.init_process_group("lockstep", **options)
    if device.type == "cuda":
        assert dist.group.WORLD._get_backend(device).device_backend().name() == "nccl"


def compare(losses, model, inputs, amp=False):
    """Returns the mean losses of all ranks and those of `model` without ranks."""
    alone = train(model, inputs.flatten(1, 2), amp=amp)
    return {"losses": losses.tolist(), "alone": alone.tolist(), "ranks": inputs.size(1)}


def over_torch(mode, device):
    """A training with torch.distributed."""
    join(device, **({"device_id": device} if mode == "groups" and device.type == "cuda" else {}))
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model(device)
    alone = copy.deepcopy(model)
    inputs = torch.randn(STEPS, size, 16, 64).to(device)
    if mode == "ddp":
        parallel = nn.parallel.DistributedDataParallel(model)
    elif mode == "groups":
        check_groups(rank, size, device)
        parallel = nn.parallel.DistributedDataParallel(model, process_group=dist.new_group(range(size)))
    else:
        other = fully_shard(copy.deepcopy(model), mesh=(mesh := init_device_mesh(device.type, (size,))))
        parallel = fully_shard(model, mesh=mesh)
    losses = train(parallel, inputs[:, rank])
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    answer = compare(losses, alone, inputs)
    if mode == "checkpoint":
        save_and_load(model, other)
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        answer["same"] = all(torch.equal(one.full_tensor(), two.full_tensor()) for one, two in pairs)
    return answer


def check_groups(rank, size, device):
    """Operations in groups of all, of one rank, and of one that is aborted."""
    for ranks in (list(range(size)), [size - 1]):
        group = dist.new_group(ranks)
        if rank in ranks:
            tensor = torch.full((3,), float(rank), device=device)
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [float(sum(ranks))] * 3
            dist.barrier(group=group)
            dist.destroy_process_group(group)
    objects = [None] * size
    dist.all_gather_object(objects, rank)
    assert objects == list(range(size))
    if size > 1:
        tensor = torch.full((4,), float(rank), device=device)
        if rank == 0:
            dist.send(tensor, size - 1)
        elif rank == size - 1:
            dist.recv(tensor, 0)
            assert tensor.eq(0).all()


def over_lockstep(mode, device):
    """A training with the package lockstep."""
    import lockstep

    world = lockstep.init(device=str(device))
    model = make_model(device)
    alone = copy.deepcopy(model)
    inputs = torch.randn(STEPS, world.size, 16, 64).to(device)
    ddp = lockstep.DistributedDataParallel(model, world)
    optimizer = None if mode == "own" else lockstep.optim.SGD(ddp, lr=0.05, momentum=0.9)
    losses = train(model, inputs[:, world.rank], optimizer, mode == "own-amp")
    world.all_reduce(losses, op="mean")
    answer = compare(losses, alone, inputs, mode == "own-amp")
    return {**answer, "transport": world.transport}


def fail(mode, device):
    join(device)
    tensor = torch.ones(1000, device=device)
    dist.all_reduce(tensor)
    if mode == "absent" and dist.get_rank() == 1:
        time.sleep(120)
    if mode == "desync" and dist.get_rank() == 1:
        dist.broadcast(tensor, 0)
    else:
        dist.all_reduce(tensor)
    print("the sum is", tensor.sum().item())


def steps(device):
    """Milliseconds of a step of 6 million parameters."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)]).to(device)
    net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    data, times = torch.ones(16, 1024, device=device), []
    for _ in range(20 if device.type == "cpu" else 30):
        begin = time.perf_counter()
        for _ in range(1 if device.type == "cpu" else 20):
            optimizer.zero_grad()
            net(data).square().mean().backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    dist.barrier()
    return {"ms": 1e3 * statistics.median(times[len(times) // 4 :]), "turns": len(times)}


def capture(device):
    """A training that hardly calls anything of torch: it replays a graph with an all_reduce."""
    dist.init_process_group("nccl", device_id=device)
    tensor = torch.ones(1000, device=device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.mul_(0.5)
        end = time.monotonic() + 12
        while time.monotonic() < end:  # longer than the watch needs to look at the operations
            pass
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
    begin, count = time.monotonic(), 0
    while time.monotonic() < begin + 12:
        graph.replay()
        torch.cuda.synchronize()
        count += 1
    dist.barrier()
    return {"replays": count}


def main():
    mode, kind = sys.argv[1:]
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    if mode.startswith("own"):
        answer = over_lockstep(mode, device)
    elif mode in ("desync", "absent"):
        answer = fail(mode, device)
    elif mode in ("steps", "capture"):
        answer = {"steps": steps, "capture": capture}[mode](device)
    else:
        answer = over_torch(mode, device)
    print(json.dumps(answer), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
