"""Hooks that reduce gradients in another way than by a sum."""

from __future__ import annotations

from typing import Any

from lockstep import _C


class PowerSGD:
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

    def state_dict(self) -> dict[str, Any]:
        """The factors, and what the approximations have lacked. Local."""
        return self._hook.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it, before the next backward(). Local."""
        self._hook.load_state_dict(state)
