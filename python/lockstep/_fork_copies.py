"""One copy of the tensors for all workers of a DataLoader.

A child made by fork() gets a copy of the tensors that Lockstep keeps in shared memory. A DataLoader, also one of torch,
forks its workers one after the other, so that they can have the same copy.
"""

import functools
from typing import Any

from torch.utils.data import dataloader

from lockstep import _C


def install() -> None:
    """For loaders that start their workers from now on."""
    iterator: Any = dataloader._MultiProcessingDataLoaderIter
    start_workers = iterator.__init__

    @functools.wraps(start_workers)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        _C.with_shared_fork_copies(lambda: start_workers(self, *arguments, **options))

    iterator.__init__ = __init__
