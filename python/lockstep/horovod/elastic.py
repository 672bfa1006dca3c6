"""The part of Horovod's elastic mode that fits a job which starts again: a state that is committed, and continued."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import shutil
import sys
import tempfile
import types
from collections.abc import Callable
from typing import Any

import torch

from lockstep.checkpoint import TrainingState
from lockstep.errors import UsageError
from lockstep.horovod import operations


class TorchState:
    """A training's state, as that of horovod.torch.elastic: commit() saves it. After `lockstep run --max-restarts` has
    started the job again, run() continues from the last commit.

    >>> state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)

    A commit is a checkpoint in runs/elastic-JOB, relative to the working directory, which all hosts must share; it
    takes as long as the disk needs. JOB is SLURM's number with the script's name and a hash of its command line, so
    that a job that SLURM requeues continues too, and the runs of a sweep do not continue each other; else that of
    `lockstep run`; without either, a new name. The folder is removed when the function of run() returns, and stays
    after a failure. A line says from which commit a training continues.

    Args:
        model, optimizer: a module and an optimizer of torch; both or none.
        members: schedules, further modules and objects with state_dict() and load_state_dict(); all others are values:
            numbers, strings, tensors, and lists and dicts of numbers and strings. They are attributes of the state;
            a new attribute becomes a value, unless its name begins with "_".
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **members: Any
    ) -> None:
        if (model is None) != (optimizer is None):
            raise UsageError("TorchState: expected both model and optimizer, or none")
        if wrong := [name for name in members if name.startswith("_")]:
            raise UsageError(f'TorchState: "{wrong[0]}" begins with "_"; such attributes are not saved')
        handled = {name: member for name, member in members.items() if _is_handled(member)}
        self._handled = {"model": model, "optimizer": optimizer, **handled}
        self._values = {name: value for name, value in members.items() if name not in handled}
        self._callbacks: list[Callable[[], object]] = []
        self._checkpoints: TrainingState | None = None
        self._folder = ""
        self._num_commits = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            for members in (self._handled, self._values):
                if name in members:
                    return members[name]
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        elif name in self._handled:
            raise UsageError(f"TorchState: {name} cannot be replaced; change it, or make a state with the new one")
        else:
            self._values[name] = value

    def register_reset_callbacks(self, callbacks: list[Callable[[], object]]) -> None:
        """run() calls them when it continues after a restart."""
        self._callbacks.extend(callbacks)

    def commit(self) -> None:
        """Saves the state, and returns when it is on the disk. Collective."""
        self._num_commits += 1
        self._open().save(self._num_commits)

    save = commit

    def check_host_updates(self) -> None:
        """Does nothing: hosts do not join a running job."""

    def sync(self) -> None:
        """Copies rank 0's modules, optimizers and values to all ranks. Collective."""
        for member in self._handled.values():
            if isinstance(member, torch.nn.Module):
                operations.broadcast_parameters(member.state_dict(), 0)
            elif isinstance(member, torch.optim.Optimizer):
                operations.broadcast_optimizer_state(member, 0)
        self._values.update(operations.broadcast_object(self._values, 0))

    def _open(self) -> TrainingState:
        if self._checkpoints is None:
            world = operations.joined()
            self._folder = world.broadcast_object(_make_folder() if world.rank == 0 else None, 0)
            state = TrainingState(world, self._folder)
            for name, member in self._handled.items():
                if member is not None:
                    state.add(name, member, self.model if isinstance(member, torch.optim.Optimizer) else None)
            values = types.SimpleNamespace(state_dict=self._values.copy, load_state_dict=self._values.update)
            self._checkpoints = state.add("members", values)
        return self._checkpoints

    def _begin(self) -> None:
        """Continues from the last commit of this job, or synchronizes a new training."""
        state = self._open()
        if not state.resume():
            self.sync()
            return
        self._num_commits = state.step
        if operations.joined().rank == 0:
            print(f"hvd.elastic: the training continues from commit {state.step}, {state.path}", file=sys.stderr)
        for callback in self._callbacks:
            callback()

    def _end(self) -> None:
        self._checkpoints = None
        world = operations.joined()
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)


def _make_folder() -> str:
    """The folder of this job, also when it starts again or SLURM has requeued it; without a launcher, which would start
    it again, a new one."""
    job = os.environ.get("LOCKSTEP_JOB")
    if slurm := os.environ.get("SLURM_JOB_ID"):
        command = hashlib.blake2b("\0".join(sys.argv).encode(), digest_size=4).hexdigest()
        job = f"{slurm}-{pathlib.Path(sys.argv[0]).stem}-{command}"
    os.makedirs("runs", exist_ok=True)
    return f"runs/elastic-{job}" if job else tempfile.mkdtemp(prefix="elastic-", dir="runs")


def _is_handled(member: Any) -> bool:
    """As modules, optimizers and schedules are."""
    return hasattr(member, "state_dict") and hasattr(member, "load_state_dict")


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator for the function that trains, whose first argument is a state. The function begins at the last commit
    if the job was started again, and otherwise with rank 0's state."""

    @functools.wraps(function)
    def call(state: TorchState, *arguments: Any, **options: Any) -> Any:
        state._begin()
        result = function(state, *arguments, **options)
        state._end()
        return result

    return call


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise UsageError(
        f"hvd.elastic.{name} is not supported: ranks cannot join or leave a running job",
        hint="use hvd.elastic.TorchState and hvd.elastic.run, and start with lockstep run --max-restarts N, and "
        "--min-hosts M to go on with fewer hosts",
    )
