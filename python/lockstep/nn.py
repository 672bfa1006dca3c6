"""Modules whose forward() needs all ranks."""

from __future__ import annotations

import copy

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep import _C
from lockstep.errors import UsageError
from lockstep.group import Group


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm for inputs (N, C, ...), whose statistics in training are those of all ranks' inputs together.

    Ranks may have batches of different sizes, including empty ones. Parameters and buffers have BatchNorm's names, so
    checkpoints are interchangeable. In training, forward() is a collective, and so is backward() if the input requires
    a gradient; otherwise the ranks raise DesyncError, which names the module. Raises UsageError, on all ranks, if a
    channel has fewer than two values over all ranks.

    Args:
        group: the ranks whose inputs are normalised together.
        name: of the module, in errors.
        The others are those of torch.nn.BatchNorm2d.
    """

    def __init__(
        self,
        num_features: int,
        group: Group,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        name: str = "SyncBatchNorm",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._group, self._name = group, name

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() >= 2 and input.size(1) == self.num_features and input.is_floating_point():
            return
        raise UsageError(
            f"{self._name}: the input is {input.dtype}{list(input.shape)}; expected (N, {self.num_features}, ...) with "
            "a floating-point dtype"
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        momentum = self.momentum or 0.0
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        mean, variance = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        return _C.sync_batch_norm(
            input, self.weight, self.bias, mean, variance, momentum, self.eps, self._group._group, self._name
        )

    def __deepcopy__(self, memo: dict) -> SyncBatchNorm:
        new = SyncBatchNorm.__new__(SyncBatchNorm)  # in the same group
        values = self.__dict__.items()
        new.__dict__.update({key: value if key == "_group" else copy.deepcopy(value, memo) for key, value in values})
        return new


def convert_sync_batch_norm(module: torch.nn.Module, group: Group) -> torch.nn.Module:
    """Replaces every BatchNorm in `module` by a SyncBatchNorm with the same parameters and buffers, so that optimizers
    remain valid. Returns `module`, or its replacement if it is a BatchNorm itself. Raises UsageError if there is none.
    """
    if isinstance(module, _BatchNorm):
        return _converted(module, group, type(module).__name__)
    found = 0
    for prefix, parent in list(module.named_modules()):
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm):
                setattr(parent, name, _converted(child, group, f"{prefix}.{name}" if prefix else name))
                found += 1
    if found == 0:
        raise UsageError("convert_sync_batch_norm: the module has no BatchNorm")
    return module


def _converted(norm: _BatchNorm, group: Group, name: str) -> SyncBatchNorm:
    new = SyncBatchNorm.__new__(SyncBatchNorm)
    new.__dict__.update(norm.__dict__)
    new._group, new._name = group, name
    return new
