"""Joins ranks that torch.distributed has numbered, over the store of their process group."""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist

from lockstep import _C

_KEY = "lockstep/world"
_POLL_SECONDS = 0.02


def default_store() -> Any:
    """The store of the default process group, over which init() joins; None without one, and where a launcher of
    Lockstep, or LOCKSTEP_ENV_FROM, says which rank this process is."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    if "LOCKSTEP_RANK" in os.environ or os.environ.get("LOCKSTEP_ENV_FROM", "auto") != "auto":
        return None
    return dist.distributed_c10d._get_default_store()


def init(rank: int, size: int, store: Any, *options: Any) -> _C.Group:
    """lockstep.init() of rank `rank`, with its options from `transport` on. Rank 0 sends the address of its store, and
    the job's key, over torch's."""

    def exchange(text: bytes, seconds: float) -> bytes:
        if rank == 0:
            store.set(_KEY, text)
            return text
        end = time.monotonic() + seconds
        while not store.check([_KEY]):  # Ctrl-C does not end Store.wait()
            if time.monotonic() > end:
                return b""
            time.sleep(_POLL_SECONDS)
        return store.get(_KEY)

    return _C.init_over(rank, size, _host_of(store), exchange, *options)


def _host_of(store: Any) -> str:
    """The host of torch's store; none if that is a file, which several hosts may share."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.FileStore):
        return ""
    return getattr(store, "host", None) or "127.0.0.1"
