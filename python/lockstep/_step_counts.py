"""Lockstep's hooks around the steps of torch's optimizers. They count the steps for the models whose parameters an
optimizer holds; ranks compare these counts."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

before_step: list[Callable[[torch.optim.Optimizer], None]] = []  # called around each step
after_step: list[Callable[[torch.optim.Optimizer], None]] = []
_counters: weakref.WeakKeyDictionary[Any, tuple[set[int], Callable[[Any], None]]] = weakref.WeakKeyDictionary()


class _Running(threading.local):
    def __init__(self) -> None:
        self.optimizers: list[weakref.ref[Any]] = []  # whose step() this thread is in, the outermost first


_running = _Running()


def when_made(kind: Any, call: Callable[[Any], object]) -> None:
    """From now on, calls call(object) when an object of the class `kind` has been made."""
    make = kind.__init__

    @functools.wraps(make)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        call(self)

    kind.__init__ = __init__


def watch(model: Any, parameters: Iterable[torch.Tensor], count: Callable[[Any], None]) -> None:
    """From now on, calls count(model) after each step of an optimizer that holds one of `parameters`."""
    _counters[model] = ({id(p) for p in parameters}, count)


def _begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for call in before_step:
        call(optimizer)
    _end_of(optimizer)  # of a step that raised an exception
    _running.optimizers.append(weakref.ref(optimizer))


def _end_of(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the step was no part of another one, as that of a ZeroRedundancyOptimizer is, whose optimizer a
    rank without parameters does not call."""
    running = _running.optimizers
    place = next((place for place, ref in enumerate(running) if ref() is optimizer), -1)
    if place >= 0:
        del running[place:]
    return place == 0


def _end(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if _end_of(optimizer) and not torch.compiler.is_compiling():
        for model, (ids, count) in list(_counters.items()):
            if not all(ids.isdisjoint(map(id, group["params"])) for group in optimizer.param_groups):
                count(model)
    for call in after_step:
        call(optimizer)


def install() -> None:
    """Called once."""
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)
