"""Dealing the indices of a dataset that has them: every rank loads only what it trains on.

The order is the one that the user's own sampler gives on rank 0. The others run theirs too, so that their random states
move as rank 0's does, and take rank 0's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import SequentialSampler

from sherd.comm import Communicator
from sherd.data import order
from sherd.data.dealing import deal, deal_whole, groups, iterations
from sherd.data.iterable import rows
from sherd.data.order import FromLeader, Known, Order
from sherd.data.way import Turn, Way, length
from sherd.errors import ConfigError

Hand = tuple[Any, float, int | None]
"""What torch loads as one batch, its share and its samples; None where the dataset makes the batches, which then have
to be seen to be counted."""


class Dealing(Way):
    """The order of the user's sampler, dealt to the ranks."""

    def __init__(self, comm: Communicator, indices: Samples | Batches) -> None:
        super().__init__(comm)
        self._indices = indices

    def indices(self, own: Iterable[Any], ahead: int) -> Iterable[Any]:
        self._indices.ahead = ahead
        return self._indices

    def turn(self, sampling: Any) -> Turn:
        if not isinstance(sampling, Hands):
            raise ConfigError(
                f"rank {self._comm.rank}: this class of loader draws its indices in a way of its own, which cannot be "
                f"dealt to ranks; pass a plain torch.utils.data.DataLoader, or leave it out of distribute"
            )
        return sampling


class Hands:
    """The hands that this rank is dealt in an epoch.

    torch draws ahead of what it yields, so what batches count is kept until they are.
    """

    def __init__(self, order: Order, hands: Iterator[Hand]) -> None:
        self._order = order
        self._hands = hands
        self._counts: deque[tuple[float, int | None]] = deque()
        self._taken = 0

    def __iter__(self) -> Hands:
        return self

    def __next__(self) -> Any:
        indices, share, samples = next(self._hands)
        self._counts.append((share, samples))
        return indices

    def take(self, draw: Callable[[], Any]) -> tuple[Any, float, int]:
        self._order.before(self._taken)
        self._taken += 1
        try:
            batch = draw()
            share, samples = self._counts[0]
            return batch, share, rows(batch) if samples is None else samples
        finally:
            if self._counts:  # also for a batch that failed to load: a loop may go on with the next one
                self._counts.popleft()


class Samples:
    """Deals samples: what torch's BatchSampler would batch. Without a batch size, one key at a time, as then
    the dataset itself may give a whole batch for a key."""

    def __init__(self, comm: Communicator, sampler: Any, batch: int | None, drop_last: bool) -> None:
        self._comm = comm
        self._sampler = sampler
        self._batch = batch
        self._size = comm.world * (batch or 1)
        self._drop_last = drop_last
        self.ahead = 0
        """How many batches are drawn before the first is taken, in the epochs that begin from now on."""

    def __len__(self) -> int:
        return iterations(len(self._sampler), self._size, self._drop_last)

    def __iter__(self) -> Hands:
        if type(self._sampler) is SequentialSampler:
            known = Known(range(len(self._sampler)))
            return Hands(known, self._deal(known))
        # torch's BatchSampler begins with the sampler when it is asked for the first batch; without one torch does at
        # once. A sampler may draw random numbers then.
        source = _late(self._sampler) if self._batch else iter(self._sampler)
        most, size = order.SAMPLES, self._size
        agreed = FromLeader(self._comm, self._sampler, source, most=most, size=size, ahead=self.ahead)
        return Hands(agreed, self._deal(agreed))

    def _deal(self, order: Order) -> Iterator[Hand]:
        for group in groups(order, self._size, self._drop_last):
            indices, share = deal(group, self._comm.world, self._comm.rank)
            yield (indices, share, len(indices)) if self._batch else (indices[0], share, None)


class Batches:
    """Deals the batches of the user's own batch sampler, as they are."""

    def __init__(self, comm: Communicator, batch_sampler: Any) -> None:
        self._comm = comm
        self._batch_sampler = batch_sampler
        self.ahead = 0

    def __len__(self) -> int:
        return iterations(len(self._batch_sampler), self._comm.world, drop_last=False)

    def __iter__(self) -> Hands:
        source, most, size = iter(self._batch_sampler), order.BATCHES, self._comm.world
        agreed = FromLeader(self._comm, self._batch_sampler, source, most=most, size=size, ahead=self.ahead)
        return Hands(agreed, self._deal(agreed))

    def _deal(self, order: Order) -> Iterator[Hand]:
        for piece, start, stop in groups(order, self._comm.world, drop_last=False):
            batches = piece[start:stop]
            counts = [samples_of(batch) for batch in batches]
            batch, share = deal_whole(batches, counts, self._comm.world, self._comm.rank)
            yield batch, share, samples_of(batch)


def samples_of(batch: Any) -> int:
    """How many samples torch loads for what a batch sampler gave."""
    found = length(batch)
    return 1 if found < 0 else found


def _late(items: Iterable[Any]) -> Iterator[Any]:
    yield from items
