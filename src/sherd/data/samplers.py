"""Dealing the indices of a map-style dataset: every rank loads only what it trains on.

The order is the one that the user's own sampler yields on rank 0. The other ranks run theirs too, so that their random
states advance as rank 0's does, but use rank 0's order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import SequentialSampler

from sherd.comm import Communicator
from sherd.data import order
from sherd.data.dealing import Seat, deal, deal_whole, groups, iterations
from sherd.data.iterable import rows
from sherd.data.order import LeaderOrder
from sherd.data.scheme import ShardingScheme, Take, length
from sherd.errors import ConfigError

DealtBatch = tuple[Any, float, int | None]
"""The indices of one batch, its weight and its number of samples: None where the dataset makes the batches, so that
they can only be counted once they are loaded."""


class Dealing(ShardingScheme):
    """The order of the user's sampler, dealt to the ranks."""

    def __init__(self, comm: Communicator, indices: Samples | Batches) -> None:
        super().__init__(comm)
        self._indices = indices

    def indices(self, own: Iterable[Any], ahead: int) -> Iterable[Any]:
        self._indices.ahead = ahead
        return self._indices

    def epoch(self, sampling: Any) -> Take:
        if not isinstance(sampling, DealtBatches):
            raise ConfigError(
                f"rank {self._comm.rank}: this loader's class draws indices by itself, so they cannot be dealt to the "
                f"ranks; pass a plain torch.utils.data.DataLoader, or leave it out of distribute"
            )
        return sampling.take


class DealtBatches:
    """The batches that this rank is dealt in an epoch.

    torch draws ahead of what it yields, so weights and counts wait here until their batches are yielded.
    """

    def __init__(self, batches: Iterator[DealtBatch], before: Callable[[int], None] = lambda batch: None) -> None:
        """`before(n)` is called before the batch number `n` is taken."""
        self._before = before
        self._batches = batches
        self._counts: deque[tuple[float, int | None]] = deque()
        self._taken = 0

    def __iter__(self) -> DealtBatches:
        return self

    def __next__(self) -> Any:
        indices, weight, samples = next(self._batches)
        self._counts.append((weight, samples))
        return indices

    def take(self, draw: Callable[[], Any]) -> tuple[Any, float, int]:
        self._before(self._taken)
        self._taken += 1
        try:
            batch = draw()
            weight, samples = self._counts[0]
            return batch, weight, rows(batch) if samples is None else samples
        finally:
            if self._counts:  # also if the batch failed to load: a loop may go on with the next one
                self._counts.popleft()


class Samples:
    """Deals the samples that torch's BatchSampler would batch; without a batch size, one key at a time, since the
    dataset may then return a whole batch for a key."""

    def __init__(self, comm: Communicator, seat: Seat, sampler: Any, batch: int | None, drop_last: bool) -> None:
        self._comm = comm
        self._seat = seat
        self._sampler = sampler
        self._batch = batch
        self._size = comm.world * (batch or 1)
        self._drop_last = drop_last
        self.ahead = 0
        """How many batches are drawn before the first is taken, in epochs that begin from now on."""

    def __len__(self) -> int:
        return iterations(len(self._sampler), self._size, self._drop_last)

    def __iter__(self) -> DealtBatches:
        if type(self._sampler) is SequentialSampler:
            return DealtBatches(self._deal([range(len(self._sampler))]))  # which every rank knows by itself
        # torch's BatchSampler starts the sampler when asked for the first batch; without one torch starts it at once.
        # It matters because a sampler may draw random numbers when it starts.
        source = _begun_late(self._sampler) if self._batch else iter(self._sampler)
        most, size = order.SAMPLES, self._size
        agreed = LeaderOrder(self._comm, self._sampler, source, most=most, size=size, ahead=self.ahead)
        return DealtBatches(self._deal(agreed), agreed.before)

    def _deal(self, pieces: Iterable[Sequence[Any]]) -> Iterator[DealtBatch]:
        for group in groups(pieces, self._size, self._drop_last):
            indices, weight = deal(group, self._seat)
            yield (indices, weight, len(indices)) if self._batch else (indices[0], weight, None)


class Batches:
    """Deals the batches of the user's own batch sampler, unchanged."""

    def __init__(self, comm: Communicator, seat: Seat, batch_sampler: Any) -> None:
        self._comm = comm
        self._seat = seat
        self._batch_sampler = batch_sampler
        self.ahead = 0

    def __len__(self) -> int:
        return iterations(len(self._batch_sampler), self._comm.world, drop_last=False)

    def __iter__(self) -> DealtBatches:
        source, most, size = iter(self._batch_sampler), order.BATCHES, self._comm.world
        agreed = LeaderOrder(self._comm, self._batch_sampler, source, most=most, size=size, ahead=self.ahead)
        return DealtBatches(self._deal(agreed), agreed.before)

    def _deal(self, pieces: Iterable[Sequence[Any]]) -> Iterator[DealtBatch]:
        for piece, start, stop in groups(pieces, self._comm.world, drop_last=False):
            batches = piece[start:stop]
            counts = [_samples_of(batch) for batch in batches]
            batch, weight = deal_whole(batches, counts, self._seat)
            yield batch, weight, _samples_of(batch)


class SingleRank(ShardingScheme):
    """A world of one: torch's own order, batches and seeds. Batches are counted, and nothing else changes.

    With `by_index`, samples are counted as the batch sampler draws them, whatever a batch is made of; else by the rows
    of a batch.
    """

    def __init__(self, comm: Communicator, by_index: bool) -> None:
        super().__init__(comm)
        self._by_index = by_index

    def indices(self, own: Iterable[Any], ahead: int) -> Iterable[Any]:
        return _Drawn(own) if self._by_index else own

    def epoch(self, sampling: Any) -> Take:
        return sampling.take if isinstance(sampling, DealtBatches) else _take_by_rows


class _Drawn:
    """What a batch sampler yields, counted."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler

    def __iter__(self) -> DealtBatches:
        drawn = iter(self._sampler)  # now, as torch does: a sampler may draw random numbers
        return DealtBatches((indices, 1.0, _samples_of(indices)) for indices in drawn)

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]  # as torch would ask it


def _take_by_rows(draw: Callable[[], Any]) -> tuple[Any, float, int]:
    batch = draw()
    return batch, 1.0, rows(batch)


def _samples_of(batch: Any) -> int:
    """How many samples torch loads for what a batch sampler yielded."""
    found = length(batch)
    return 1 if found < 0 else found


def _begun_late(items: Iterable[Any]) -> Iterator[Any]:
    yield from items
