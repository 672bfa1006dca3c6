"""Lightning over Lockstep: importing this module adds the strategy "lockstep" to Trainer and Fabric.

>>> import lockstep.lightning
>>> trainer = lightning.pytorch.Trainer(strategy="lockstep", accelerator="cpu", devices=2)
>>> fabric = lightning.fabric.Fabric(strategy="lockstep", accelerator="cpu", devices=2)

$ lockstep run -n 2 python train.py

Scripts with strategy="ddp" run under `lockstep run` unchanged. This strategy averages gradients by
lockstep.DistributedDataParallel instead of torch's, so that wraps no module. It serves the packages lightning,
pytorch_lightning and lightning_fabric, whichever are installed.
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
# The options of Lightning's own strategies; all others are those of lockstep.DistributedDataParallel.
_OWN_OPTIONS = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "precision",
    "timeout",
    "start_method",
)


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


def _take_own(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options.pop(name) for name in _OWN_OPTIONS if name in options}


def _make_ddp(model: Any, options: dict[str, Any]) -> DistributedDataParallel:
    world = group.world()
    if world is None:
        raise UsageError('LockstepStrategy: the default process group has not the backend "lockstep"')
    try:
        return lockstep.DistributedDataParallel(model, world, **options)
    except TypeError as error:
        raise UsageError(
            f"LockstepStrategy: {error}", hint="the options are those of lockstep.DistributedDataParallel"
        ) from error


def _fabric_strategy(fabric: str) -> Any:
    base = importlib.import_module(f"{fabric}.strategies").DDPStrategy

    class LockstepFabricStrategy(base):  # type: ignore[valid-type, misc]
        """Fabric's DDPStrategy with lockstep.DistributedDataParallel, one for each module that Fabric.setup() gets.

        Args:
            options: of lockstep.DistributedDataParallel. Fabric's own, such as timeout, go to DDPStrategy.
        """

        def __init__(self, **options: Any) -> None:
            super().__init__(**_take_own(options), process_group_backend="lockstep")
            self._options = options
            self._backward_sync_control = self
            self.ddp_of: dict[Any, DistributedDataParallel] = {}  # by module

        def setup_module(self, module: Any) -> Any:
            self.ddp_of[module] = _make_ddp(module, self._options)
            return module

        def no_backward_sync(self, module: Any, enabled: bool) -> Any:
            """What Fabric.no_backward_sync() enters, for accumulating gradients over several batches."""
            return self.ddp_of[module].no_sync() if enabled else contextlib.nullcontext()

    return LockstepFabricStrategy


def _strategy(lightning: str) -> Any:
    base = importlib.import_module(f"{lightning}.strategies").DDPStrategy

    class LockstepStrategy(base):  # type: ignore[valid-type, misc]
        """Lightning's DDPStrategy with lockstep.DistributedDataParallel.

        Args:
            options: of lockstep.DistributedDataParallel. Lightning's own, such as timeout, go to DDPStrategy; those of
                torch's DistributedDataParallel are refused.
        """

        strategy_name = "lockstep"

        def __init__(self, **options: Any) -> None:
            super().__init__(**_take_own(options), process_group_backend="lockstep")
            self._options = options
            self.ddp: DistributedDataParallel | None = None  # for optimizers of lockstep.optim, in configure_optimizers

        def _setup_model(self, model: Any) -> Any:
            self.ddp = _make_ddp(model, self._options)
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


def _callback(lightning: str) -> Any:
    base = importlib.import_module(f"{lightning}.callbacks").Callback

    class SaveOnStopRequest(base):  # type: ignore[valid-type, misc]
        """Saves a checkpoint and ends all ranks with exit code 75, after the same step, when one has received SIGUSR1
        or SIGTERM, as before a time limit of SLURM. `lockstep submit` then requeues the job. Requires the strategy
        "lockstep", and replaces Lightning's own handlers of these signals.

        >>> saver = lockstep.lightning.SaveOnStopRequest("stopped.ckpt")
        >>> trainer = lightning.pytorch.Trainer(strategy="lockstep", callbacks=[saver])
        >>> trainer.fit(model, ckpt_path=saver.ckpt_path)

        Args:
            path: of the checkpoint, on a file system that all hosts see. It is not removed when the training ends.
        """

        def __init__(self, path: str | os.PathLike[str]) -> None:
            self.path = os.fspath(path)
            self._world: Any = None

        @property
        def ckpt_path(self) -> str | None:
            """The path, or None if no checkpoint is there."""
            return self.path if os.path.exists(self.path) else None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if getattr(trainer.strategy, "strategy_name", "") != "lockstep":
                raise UsageError('SaveOnStopRequest: requires Trainer(strategy="lockstep")')
            self._world = trainer.strategy.ddp.group
            self._world.stop_requested()  # from here on, the signals only set a flag

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if self._world.stop_requested():
                trainer.save_checkpoint(self.path)
                raise SystemExit(lockstep.PREEMPTED)

    return SaveOnStopRequest


def _register() -> None:
    """Registers the strategies with every package of Lightning that is installed."""
    for lightning, fabric in _PACKAGES:
        if importlib.util.find_spec(fabric.partition(".")[0]) is None:
            continue
        globals().setdefault("LockstepEnvironment", _environment(fabric))
        for package, name, make in (
            (lightning, "LockstepStrategy", _strategy),
            (fabric, "LockstepFabricStrategy", _fabric_strategy),
        ):
            if importlib.util.find_spec(package.partition(".")[0]) is None:
                continue
            strategies = importlib.import_module(f"{package}.strategies")
            registry = getattr(strategies, "StrategyRegistry", None) or strategies.STRATEGY_REGISTRY
            strategy = make(package)
            globals().setdefault(name, strategy)
            registry.register("lockstep", strategy, description="DDP over Lockstep", override=True)
            if package == lightning:
                globals().setdefault("SaveOnStopRequest", _callback(package))
    if "LockstepEnvironment" not in globals():
        raise UsageError(
            "lockstep.lightning: none of lightning, pytorch_lightning and lightning_fabric is installed",
            hint="pip install lightning",
        )


_register()
