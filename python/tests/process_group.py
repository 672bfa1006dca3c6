"""The default group of torch.distributed, over the backend "lockstep"."""

import contextlib

import torch
import torch.distributed as dist


@contextlib.contextmanager
def process_group(backend="lockstep", **options):
    """Each test makes the group anew in the same process. Gives the rank and the size."""
    dist.init_process_group(backend, **options)
    try:
        assert dist.group.WORLD._get_backend(torch.device("cpu")).name() == "lockstep"
        yield dist.get_rank(), dist.get_world_size()
    finally:
        if dist.is_initialized():  # not after an abort
            dist.destroy_process_group()
