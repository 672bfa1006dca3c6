"""Batches for a training loop: each rank draws its own part of the dataset, in a new order in each epoch.

>>> loader = lockstep.data.DataLoader(dataset, world, batch_size=64, num_workers=4)
>>> for epoch in loader.remaining_epochs(10):
...     for x, y in loader.epoch(epoch):
...         ...

The order is that of the C++ library: the same seed gives every rank the same samples there and here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.utils.data

from lockstep import _C, _failures
from lockstep.errors import UsageError
from lockstep.group import Group

__all__ = ["DataLoader", "Sampler"]

Mode = Literal["pad", "drop", "exact"]
"""What happens if the number of samples is not a multiple of the number of ranks. "pad": all ranks draw the same
number, and the order continues from its beginning; "drop": all ranks draw the same number, and the last samples are
omitted; "exact": each sample is drawn by exactly one rank, for evaluation."""


class Sampler(torch.utils.data.Sampler[int]):
    """This rank's samples of an epoch, for a DataLoader of torch.

    Args:
        dataset: whose length counts, or that length.
        world: the ranks that share the samples; None: this rank alone.
        seed: of the order; the same on all ranks.
        shuffle: False: the dataset's own order in every epoch.
        mode: see Mode.

    Call set_epoch() before each epoch. A sampler does not know which of its samples have reached the program, because
    workers draw ahead: DataLoader does, and can continue inside an epoch.
    """

    def __init__(
        self, dataset: Any, world: Group | None = None, *, seed: int = 0, shuffle: bool = True, mode: Mode = "pad"
    ) -> None:
        self._num_samples = dataset if isinstance(dataset, int) else len(dataset)
        self._shard = (world.rank, world.size) if world else (0, 1)
        self._seed, self._shuffle, self._mode = seed, shuffle, mode
        self._epoch = 0
        self._length = len(self._indices())

    def _indices(self) -> list[int]:
        rank, size = self._shard
        return _C.epoch_indices(self._num_samples, rank, size, self._seed, self._shuffle, self._mode, self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Selects the order of the next iteration."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices())

    def __len__(self) -> int:
        return self._length


class _Batches:
    """The indices of the batches of the pass that begins next; torch's workers read them ahead."""

    def __init__(self) -> None:
        self.next_pass: Any = None

    def __iter__(self) -> Iterator[list[int]]:
        current = self.next_pass  # now, and not when the first batch is asked for
        return (current.indices(batch) for batch in range(current.num_batches()))

    def __len__(self) -> int:
        return self.next_pass.num_batches()


class DataLoader:
    """A torch.utils.data.DataLoader over this rank's part of a dataset, which knows exactly which batches the program
    has received, also with workers, and resumes there, also with another number of ranks.

    Args:
        dataset: one with `__getitem__` and `__len__`. If it has set_epoch(epoch), that is called before each epoch.
        world: the ranks that share the samples. They count the batches of each other: a rank at another batch is a
            DesyncError in its next backward(). None: this rank alone.
        batch_size: samples per batch of one rank.
        seed: of the order; the same on all ranks.
        shuffle: False: the dataset's own order in every epoch.
        mode: see Mode.
        drop_last: omits a last batch that is not full; not with mode "exact".
        options: those of torch.utils.data.DataLoader, such as num_workers, collate_fn, pin_memory and
            persistent_workers.

    Workers draw other random numbers on each rank, in each epoch, and after each position at which a training resumes:
    their seeds are a function of these and of `seed`. Without workers, samples draw from the generators of the program.
    Draw random numbers for a sample from its index and epoch, not from a generator of the worker: then a training that
    resumes inside an epoch draws the same.
    """

    def __init__(
        self,
        dataset: Any,
        world: Group | None = None,
        *,
        batch_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        mode: Mode = "pad",
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        _failures.add_owner(self)
        taken = sorted(set(options) & {"sampler", "batch_sampler"})
        if taken:
            raise UsageError(
                f"DataLoader has no option {taken[0]}; expected seed, shuffle and mode",
                hint="use lockstep.data.Sampler with torch's DataLoader for an order of your own",
            )
        if isinstance(dataset, torch.utils.data.IterableDataset):
            raise UsageError("an IterableDataset has no samples by number; expected a dataset with __getitem__")
        if hasattr(dataset, "set_epoch") and options.get("persistent_workers"):
            raise UsageError("persistent workers keep a copy of the dataset, which set_epoch() does not reach")
        self._dataset = dataset
        self._positions: Any = _C.LoaderPositions(
            len(dataset), world._group if world else None, batch_size, seed, shuffle, mode, drop_last
        )
        self._batches = _Batches()
        # A generator of its own, so that the order of the program's random numbers does not depend on this loader.
        self._generator = None if "generator" in options else torch.Generator()
        options.setdefault("generator", self._generator)
        self._seed, self._rank = seed, world.rank if world else 0
        batches: Any = self._batches
        self._loader: Any = torch.utils.data.DataLoader(dataset, batch_sampler=batches, **options)

    _CLOSE_ORDER = 0

    def _close(self) -> None:
        self._positions = self._batches.next_pass = None  # they hold the group

    def epoch(self, epoch: int) -> Iterator[Any]:
        """Iterates over the batches of epoch number `epoch`: the remaining ones if load_state_dict() has set a position
        in it, else all."""
        return self._receive(self._positions.start(epoch))

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the rest of the current epoch, or over the next one if no batch remains."""
        return self._receive(self._positions.resume())

    def _receive(self, current: Any) -> Iterator[Any]:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._positions.epoch())
        self._batches.next_pass = current
        if self._generator is not None:
            # From a string: torch's generator reads 32 bits of its seed, which a hash of it fills.
            seed = f"{self._seed} {self._rank} {self._positions.epoch()} {self._positions.samples_drawn()}"
            self._generator.manual_seed(random.Random(seed).getrandbits(63))
        batches = iter(self._loader)  # reads the pass at once; with workers, in this process
        return self._count(current, batches)

    @staticmethod
    def _count(current: Any, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            current.receive()
            yield batch
        current.receive()

    def __len__(self) -> int:
        """The number of batches of this rank in a complete epoch."""
        return self._positions.batches_per_epoch()

    def remaining_epochs(self, num_epochs: int) -> range:
        """The numbers of the epochs below `num_epochs` that have batches left after the current position."""
        return range(min(self._positions.next_epoch(), num_epochs), num_epochs)

    @property
    def is_exact(self) -> bool:
        """Whether all ranks together draw each sample at most once per epoch."""
        return self._positions.is_exact()

    @property
    def samples_drawn(self) -> int:
        """Samples that all ranks together have received in the current epoch."""
        return self._positions.samples_drawn()

    @property
    def current_epoch(self) -> int:
        """The number of the epoch in which the loader is."""
        return self._positions.epoch()

    def state_dict(self) -> dict[str, Any]:
        """The position, for load_state_dict(): the batch that the loop holds counts as drawn. Between two steps it is
        the same on all ranks. A checkpoint of the C++ library has the same values."""
        return self._positions.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration of that epoch continue at the saved position, which may have been saved with another
        number of ranks. Raises UsageError if it belongs to another dataset, seed or order."""
        self._positions.load_state_dict(state)
