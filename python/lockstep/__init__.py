"""Distributed data-parallel training with nothing to wrap.

>>> import lockstep, torch
>>> world = lockstep.init()                            # before the first tensor
>>> net = Net()                                        # stays what it is
>>> ddp = lockstep.DistributedDataParallel(net, world)
>>> optimizer = lockstep.optim.AdamW(ddp, lr=1e-3)     # or torch.optim.AdamW(net.parameters())
>>> for x, y in loader:
...     optimizer.zero_grad()
...     loss_function(net(x), y).backward()
...     optimizer.step()

$ lockstep run -n 4 python train.py
"""

# ruff: noqa: E402
import pathlib

from lockstep import _compatibility

# Where `_C` is. Imports torch, whose libraries it needs.
__path__.append(_compatibility.find(pathlib.Path(__file__).parent))

import _lockstep_backend

from lockstep import _C, checkpoint, data, nn, optim
from lockstep._failures import PREEMPTED
from lockstep.ddp import DistributedDataParallel, broadcast_parameters, join
from lockstep.errors import (
    CommError,
    DesyncError,
    Error,
    FormatError,
    PeerLostError,
    SystemError,
    TimeoutError,
    UsageError,
)
from lockstep.group import Group, Work, init
from lockstep.hooks import Int8, PowerSGD
from lockstep.host_shared import HostShared, host_shared
from lockstep.host_sync import HostSync
from lockstep.outer import DiLoCo, SparseLoCo

__version__ = _C.version()
_lockstep_backend.register()

__all__ = ["PREEMPTED", "__version__", "checkpoint", "data", "nn", "optim"]
__all__ += ["Group", "Work", "init"]
__all__ += ["DistributedDataParallel", "broadcast_parameters", "join"]
__all__ += ["DiLoCo", "HostShared", "HostSync", "Int8", "PowerSGD", "SparseLoCo", "host_shared"]
__all__ += ["CommError", "DesyncError", "Error", "FormatError", "PeerLostError"]
__all__ += ["SystemError", "TimeoutError", "UsageError"]
