"""Tells DistributedDataParallel of the backward() calls that Python makes.

torch's Python functions call the engine of torch's extension, which does not ask C++ for its default engine. All of
them call it through the attribute Variable._execution_engine, which install() replaces by an engine that does the same,
with the hooks of DistributedDataParallel around it.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._C import _ImperativeEngine
from torch.autograd.variable import Variable

from lockstep import _C

_before_backward: list[Callable[[], None]] = []
_after_backward: list[Callable[[], None]] = []


def around_backward(before: Callable[[], None], after: Callable[[], None] = lambda: None) -> None:
    """Registers functions that are called before and after each backward() of Python that is not inside another one."""
    _before_backward.append(before)
    _after_backward.append(after)


_ACCUMULATE_GRAD = 6  # position of this argument of run_backward()


class _Engine(_ImperativeEngine):
    def run_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        accumulates = kwargs.get(
            "accumulate_grad", args[_ACCUMULATE_GRAD - 1] if len(args) >= _ACCUMULATE_GRAD else False
        )
        run = super().run_backward
        if not accumulates:  # torch.autograd.grad()
            return run(tensors, *args, **kwargs)
        roots = [root for root in tensors if isinstance(root, Tensor)]
        if _C.in_backward():  # in a function of the graph, such as a re-entrant checkpoint
            return _C.run_backward(roots, lambda: run(tensors, *args, **kwargs))
        for function in _before_backward:
            function()
        result = _C.run_backward(roots, lambda: run(tensors, *args, **kwargs))
        for function in _after_backward:
            function()
        return result


def install() -> None:
    """Called once."""
    Variable._execution_engine = _Engine()
