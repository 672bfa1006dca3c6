"""Fails as a user's program does. Usage: error_program.py CASE [TEXT | FORM [TEXT]]

FORM is "gloo" or "lockstep", the backend of torch.distributed that the program uses, or "package"."""

import argparse
import os
import socket
import sys
import time


def text():
    """Raises an error with the text that another library would give it."""
    raise RuntimeError(sys.argv[2])


def join():
    """Joins the job as the form says. Returns what must live on."""
    form = sys.argv[2]
    if form == "package":
        import lockstep

        return lockstep.init()
    import torch.distributed as dist

    if form == "lockstep":
        import _lockstep_backend

        _lockstep_backend.register()
    dist.init_process_group(form)
    return dist


def joined_text():
    joined = join()  # noqa: F841  # leaves its world when it is dropped
    raise RuntimeError(sys.argv[3])


def chain():
    joined = join()  # noqa: F841
    try:
        raise LookupError("sample 1234 has no label")
    finally:
        raise RuntimeError("cannot close the file")


def worker():
    from torch.utils.data import DataLoader

    joined = join()  # noqa: F841
    next(iter(DataLoader([0], num_workers=1, collate_fn=unreadable)))


def unreadable(batch):
    raise LookupError("sample 1234 has no label")


def local_rank():
    argparse.ArgumentParser(prog="train.py").parse_args(["--local_rank=0"])


def local_rank_required():
    parser = argparse.ArgumentParser(prog="train.py")
    parser.add_argument("--local_rank", required=True)
    parser.parse_args([])


def no_module():
    import numpy_of_another_world  # noqa: F401


def inplace():
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    x = torch.randn(4, 3, requires_grad=True)
    y = net(x) * x
    with torch.no_grad():
        net[0].weight.add_(1)
    y.sum().backward()


def unused_parameter():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    net = torch.nn.ModuleList((torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)))
    net.forward = lambda x: net[0](x)
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    for _ in range(2):
        ddp(torch.ones(2, 3)).sum().backward()


def not_initialized():
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))


def twice():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.init_process_group("gloo")


def address_in_use():
    import torch.distributed as dist

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
        dist.init_process_group("gloo")


def names_of_a_wrapper():
    import torch

    net = torch.nn.Linear(3, 3)
    net.load_state_dict({f"module.{name}": value for name, value in net.state_dict().items()})


def weights_only():
    import tempfile

    import torch

    with tempfile.NamedTemporaryFile() as file:
        torch.save({"args": argparse.Namespace(lr=1)}, file.name)
        torch.load(file.name)


def culprit():
    """The last rank fails. It closes its connections long before it ends, so that the others end first."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    last = dist.get_rank() == dist.get_world_size() - 1
    for step in range(100):
        dist.all_reduce(torch.ones(10))
        if last and step == 10:
            try:
                raise ValueError("bad sample 4711")
            finally:
                dist.destroy_process_group()
                if len(sys.argv) > 2:
                    time.sleep(float(sys.argv[2]))


def early_end():
    """Ranks 0 and 2 end, and rank 1 still needs one of them: the last to end, or the first if rank 1 is late."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    source, is_late = int(sys.argv[2]), len(sys.argv) > 3
    if dist.get_rank() == 1:
        time.sleep(1.5 * is_late)
        dist.recv(torch.ones(1), src=source)
    elif (dist.get_rank() == source) != is_late:
        time.sleep(1)


globals()[sys.argv[1]]()
