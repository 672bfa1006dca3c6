"""Lightning over Lockstep: importing this module adds the strategy "lockstep".

>>> import lockstep.lightning
>>> trainer = lightning.pytorch.Trainer(strategy="lockstep", accelerator="cpu", devices=2)

$ lockstep run -n 2 python train.py

Scripts with strategy="ddp" run under `lockstep run` unchanged. This strategy averages gradients by
lockstep.DistributedDataParallel instead of torch's, so the LightningModule is not wrapped. It serves the packages
lightning and pytorch_lightning, whichever are installed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import lockstep
from lockstep import group
from lockstep.ddp import DistributedDataParallel
from lockstep.errors import UsageError

_PACKAGES = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))


def _environment(fabric: str) -> Any:
    base = importlib.import_module(f"{fabric}.plugins.environments").TorchElasticEnvironment

    class LockstepEnvironment(base):  # type: ignore[valid-type, misc]
        """The ranks of `lockstep run`, for Trainer(plugins=[LockstepEnvironment()]). Lightning finds them without it,
        too; with it, the number of ranks is explained."""

        @staticmethod
        def detect() -> bool:
            return "LOCKSTEP_RANK" in os.environ

        def validate_settings(self, num_devices: int, num_nodes: int) -> None:
            size = self.world_size()
            if num_devices * num_nodes != size:
                raise UsageError(
                    f"Trainer has devices={num_devices} and num_nodes={num_nodes}, {num_devices * num_nodes} ranks; "
                    f"`lockstep run` has started {size}",
                    hint=f"use devices={os.environ.get('LOCKSTEP_LOCAL_WORLD_SIZE', size)} and "
                    f"num_nodes={os.environ.get('LOCKSTEP_NUM_NODES', 1)}, or start another number of ranks",
                )

    return LockstepEnvironment


def _strategy(lightning: str) -> Any:
    base = importlib.import_module(f"{lightning}.strategies").DDPStrategy

    class LockstepStrategy(base):  # type: ignore[valid-type, misc]
        """Lightning's DDPStrategy with lockstep.DistributedDataParallel.

        Args:
            options: of lockstep.DistributedDataParallel. Lightning's own, such as timeout, go to DDPStrategy; those of
                torch's DistributedDataParallel are refused.
        """

        strategy_name = "lockstep"
        _OWN = (
            "accelerator",
            "parallel_devices",
            "cluster_environment",
            "checkpoint_io",
            "precision_plugin",
            "timeout",
            "start_method",
        )

        def __init__(self, **options: Any) -> None:
            super().__init__(
                **{name: options.pop(name) for name in self._OWN if name in options}, process_group_backend="lockstep"
            )
            self._options = options
            self.ddp: DistributedDataParallel | None = None  # for optimizers of lockstep.optim, in configure_optimizers

        def _setup_model(self, model: Any) -> Any:
            world = group.world()
            if world is None:
                raise UsageError('LockstepStrategy: the default process group has not the backend "lockstep"')
            try:
                self.ddp = lockstep.DistributedDataParallel(model, world, **self._options)
            except TypeError as error:
                raise UsageError(
                    f"LockstepStrategy: {error}", hint="the options are those of lockstep.DistributedDataParallel"
                ) from error
            return model

        def _register_ddp_hooks(self) -> None:
            pass

        @contextlib.contextmanager
        def block_backward_sync(self) -> Iterator[None]:
            """While gradients are accumulated over several batches."""
            with self.ddp.no_sync() if self.ddp is not None else contextlib.nullcontext():
                yield

        def teardown(self) -> None:
            self.ddp = None
            super().teardown()

    return LockstepStrategy


def _register() -> None:
    """Registers the strategy with every package of Lightning that is installed."""
    found = False
    for lightning, fabric in _PACKAGES:
        if importlib.util.find_spec(lightning.partition(".")[0]) is None:
            continue
        found = True
        strategy = _strategy(lightning)
        registry = importlib.import_module(f"{lightning}.strategies").StrategyRegistry
        registry.register("lockstep", strategy, description="DDP over Lockstep", override=True)
        globals().setdefault("LockstepStrategy", strategy)
        globals().setdefault("LockstepEnvironment", _environment(fabric))
    if not found:
        raise UsageError(
            "lockstep.lightning: neither lightning nor pytorch_lightning is installed",
            hint="pip install lightning",
        )


_register()
