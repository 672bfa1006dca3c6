"""Outer optimizers: how hosts that train apart for some steps become equal again."""

import dataclasses

from lockstep.errors import UsageError


def _check_types(options: object) -> None:
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        value, kind = getattr(options, field.name), type(field.default)
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool):
            raise UsageError(
                f"{type(options).__name__}: {field.name} is {value!r}; expected a value like {field.default!r}"
            )


@dataclasses.dataclass(frozen=True)
class DiLoCo:
    """Every host keeps a copy of the parameters that all hosts have in common. In a round, the mean over the hosts of
    (copy - parameters) is a gradient for the copy, which SGD with Nesterov momentum updates, and all hosts go on from
    it (Douillard and others, 2023, https://arxiv.org/abs/2311.08105).

    Args:
        learning_rate: 0: by the number of hosts, 0.5 for one host, 0.6 for 2, 0.7 for 3 and 4, 0.9 for more (Charles
            and others, 2025, https://arxiv.org/abs/2503.09799).
        payload: "float32", "bfloat16", "int8" or "int4": what numbers are sent as. What rounding has lost is added to
            the next round.
        warm_up: so many steps at the start, the hosts take the mean of their parameters after each step.
    """

    learning_rate: float = 0.0
    momentum: float = 0.9
    payload: str = "float32"
    warm_up: int = 0

    def __post_init__(self) -> None:
        _check_types(self)


@dataclasses.dataclass(frozen=True)
class SparseLoCo:
    """As DiLoCo, without momentum; of each 4096 numbers a host sends only the `keep` largest, with 2 bits each, and
    keeps the rest for later rounds (Sarfi and others, 2025, https://arxiv.org/abs/2508.15706).

    Args:
        error_decay: what was not sent is multiplied by it in each round.
        warm_up: as in DiLoCo.
    """

    learning_rate: float = 1.0
    error_decay: float = 0.95
    keep: int = 64
    warm_up: int = 0

    def __post_init__(self) -> None:
        _check_types(self)
