#!/usr/bin/env python3
"""Tests the backend "lockstep" of torch.distributed on two hosts, which are network namespaces, with two ranks each,
and how much of the gradients lockstep.HostSync sends between them.

Usage: torch_backend.py --python INTERPRETER --package FOLDER. The folder is added to PYTHONPATH. The exit code is 77 if
the machine lacks what the test requires.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
from checks import check  # noqa: E402

BYTES = 32 << 20
STEPS = 8
# Backend, every, wire_dtype, and what crosses the network, beside the bytes of all gradients.
SYNCS = (
    ("lockstep", 4, "float32", 0.25),
    ("lockstep", 4, "bfloat16", 0.125),
    ("lockstep", 1, "bfloat16", 0.5),
    ("gloo", 4, "float32", 0.25),
    ("gloo", 4, "bfloat16", 0.125),
)


def rank_main():
    """What each rank runs: an all_reduce whose traffic is measured, and a training with DistributedDataParallel."""
    import _lockstep_backend
    import torch
    import torch.distributed as dist

    _lockstep_backend.register()
    dist.init_process_group(
        "lockstep", init_method=sys.argv[2], rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    net, alone = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
    alone.load_state_dict(net.state_dict())
    parallel = torch.nn.parallel.DistributedDataParallel(net)
    inputs = torch.randn(3, size, 8, 6)
    for model, input_of in (
        (parallel, lambda step: inputs[step, rank]),
        (alone, lambda step: inputs[step].flatten(0, 1)),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(len(inputs)):
            optimizer.zero_grad()
            model(input_of(step)).square().mean().backward()
            optimizer.step()
    difference = (net.weight - alone.weight).abs().max().item()
    got = torch.zeros(2)
    if rank == size - 1:
        dist.send(torch.full((2,), 7.0), 0)
    elif rank == 0:
        assert dist.recv(got) == size - 1
    tensor = torch.full((BYTES // 4,), float(rank))
    if rank == 0:
        print("ready", flush=True)
        sys.stdin.readline()
    dist.all_reduce(tensor)
    dist.barrier()
    if rank == 0:
        answer = {"sum": tensor.unique().tolist(), "difference": difference, "received": got.tolist()}
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


def sync_main():
    """What each rank runs: STEPS steps with lockstep.HostSync, whose traffic is measured."""
    import torch
    import torch.distributed as dist

    import lockstep

    dist.init_process_group(
        sys.argv[2], init_method="env://", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    net = torch.nn.Linear(1024, BYTES // 4096, bias=False)
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    dtype = getattr(torch, sys.argv[4])
    hosts = lockstep.HostSync(ddp, every=int(sys.argv[3]), wire_dtype=dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if dist.get_rank() == 0:
        print("ready", flush=True)
        sys.stdin.readline()
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.full((2, 1024), 1.0 + step + dist.get_rank())).mean().backward()
        optimizer.step()
    hosts.sync()
    weights = [None] * dist.get_world_size()
    dist.all_gather_object(weights, net.weight.sum().item())
    if dist.get_rank() == 0:
        print(json.dumps({"weights": weights}), flush=True)
    dist.destroy_process_group()


def main():
    import host_cluster
    from cluster_job import Job, hosts_of_ranks, run

    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True)
    parser.add_argument("--package", required=True)
    args = parser.parse_args()
    if not args.python:
        host_cluster.skip("no Python with torch (scripts/setup.sh installs one)")
    host_cluster.enter_sandbox(("ip",))
    env = {"LOCKSTEP_LOG": "quiet", "PYTHONPATH": args.package, "PYTHONDONTWRITEBYTECODE": 1}
    with tempfile.TemporaryDirectory() as folder:
        cluster = host_cluster.HostCluster(2, folder)
        # As on Debian, each host's own name is an address there that no other host reaches.
        script = (
            'hostname=$(hostname); sed "s/^.* $hostname$/127.0.1.1 $hostname/" /etc/hosts >"$0.$$" &&'
            ' mount --bind "$0.$$" /etc/hosts && exec "$@"'
        )
        in_debian = ["unshare", "--mount", "sh", "-c", script, f"{folder}/names"]
        for order, init_method, variables in (
            ("contiguous", "env://", {}),
            ("interleaved", "env://", {"MASTER_ADDR": "h1"}),
            ("contiguous", f"file://{folder}/store", {}),
        ):
            where = hosts_of_ranks(2, 2, order)
            words = [*in_debian, args.python, __file__, "rank", init_method]
            answer, crossed = run(cluster, Job, where, words, {**env, **variables})
            what = f"{order}, {init_method.partition(':')[0]} {variables.get('MASTER_ADDR', '')}"
            check(answer["sum"] == [6.0], f"{what}: the sum is {answer['sum']}")
            check(answer["received"] == [7.0, 7.0], f"{what}: rank 0 received {answer['received']} from any rank")
            check(answer["difference"] < 1e-6, f"{what}: the weights differ by {answer['difference']:.1e}")
            check(0.95 < crossed / BYTES <= 1.06, f"{what}: the traffic is {crossed / BYTES:.3f} of the tensor")
        for backend, every, dtype, share in SYNCS:
            where = hosts_of_ranks(2, 2, "contiguous")
            words = [*in_debian, args.python, __file__, "sync", backend, every, dtype]
            answer, crossed = run(cluster, Job, where, words, {**env, "GLOO_SOCKET_IFNAME": "eth0"})
            what, part = f"{backend}, every {every}, {dtype}", crossed / (STEPS * BYTES)
            check(len(set(answer["weights"])) == 1, f"{what}: the weights are {answer['weights']}")
            check(0.95 * share < part <= 1.1 * share, f"{what}: the traffic is {part:.3f} of the gradients")


if __name__ == "__main__":
    {"rank": rank_main, "sync": sync_main}.get(sys.argv[1], main)()
