"""Hooks that reduce gradients in another way than by a sum."""

from __future__ import annotations

from typing import Any

from lockstep import _C


class StatefulHook:
    """Of PowerSGD and Int8."""

    _hook: Any

    def state_dict(self) -> dict[str, Any]:
        """What was not sent yet, and what else the next reduction needs. Local."""
        return self._hook.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it, before the next backward(). Local."""
        self._hook.load_state_dict(state)


class PowerSGD(StatefulHook):
    """Sends the factors of a low-rank approximation of each gradient, 1 to 2 % of the bytes with rank 4: the option
    `hook` of DistributedDataParallel. Each object serves one of them.

    It is the alternating form of PowerSGD (Vogels, Karimireddy, Jaggi, 2019, https://arxiv.org/abs/1905.13727): one
    all_reduce for each bucket. What the approximation of a rank's gradient lacks is added to its next one, in the scale
    of a loss scaler. Gradients of less than two dimensions, and those that would become less than twice as small, are
    not approximated. All that is sent is float32. A reduction with an infinity or a NaN gives NaNs on all ranks and
    changes no state. Clip gradients after backward(). The state is each rank's own:
    lockstep.checkpoint.TrainingState.add("powersgd", hook).

    Args:
        rank: of the approximation, 1 to 8.
        dense_steps: so many reductions at the start approximate nothing.

    Raises:
        UsageError: an argument is out of range.
    """

    def __init__(self, rank: int = 4, dense_steps: int = 10) -> None:
        self._hook = _C.PowerSgdHook(rank, dense_steps)


class Int8(StatefulHook):
    """Sends gradients as int8 in every reduction, a quarter of the bytes of float32: the option `hook` of
    DistributedDataParallel. Each object serves one of them.

    256 numbers share a float32 scale. What rounding loses is added to the next gradient (error feedback, Karimireddy
    and others, 2019, https://arxiv.org/abs/1901.09847), in the scale of a loss scaler. With the transport hierarchy,
    the sum of each host is rounded, and nothing inside a host; with tcp and mpi, every rank sends its rounded gradients
    to every other. A reduction with an infinity or a NaN gives NaNs on all ranks and drops what was not sent yet. Clip
    gradients after backward(). The state is each rank's own: lockstep.checkpoint.TrainingState.add("int8", hook). It is
    restored for the same ranks, hosts and buckets (bucket_layout).
    """

    def __init__(self) -> None:
        self._hook = _C.Int8Hook()
