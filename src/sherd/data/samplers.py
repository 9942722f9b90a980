"""Dealing the indices of a dataset that has them: every rank loads only what it trains on.

The order is the one that the user's own sampler gives on rank 0. The others run theirs too, so that their random states
move as rank 0's does, and take rank 0's.
"""

from __future__ import annotations

import itertools
import numbers
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler, SequentialSampler

from sherd.comm import Communicator, labelled
from sherd.data.dealing import deal, deal_whole, groups, iterations
from sherd.data.way import Turn, Way
from sherd.errors import ConfigError

Hand = tuple[Any, float]  # what torch loads as one batch, and its share


class Dealing(Way):
    """The order of the user's sampler, dealt to the ranks."""

    def __init__(self, comm: Communicator, indices: Samples | Batches) -> None:
        super().__init__(comm)
        self.indices = indices

    def turn(self, sampling: Any) -> Turn:
        if not isinstance(sampling, Hands):
            raise ConfigError(
                f"rank {self._comm.rank}: this class of loader draws its indices in a way of its own, which cannot be "
                f"dealt to ranks; pass a plain torch.utils.data.DataLoader, or leave it out of distribute"
            )
        return sampling


class Hands:
    """The hands that this rank is dealt in an epoch.

    torch draws ahead of what it yields, so shares are kept until their batches are.
    """

    def __init__(self, hands: Iterator[Hand]) -> None:
        self._hands = hands
        self._shares: deque[float] = deque()

    def __iter__(self) -> Hands:
        return self

    def __next__(self) -> Any:
        indices, share = next(self._hands)
        self._shares.append(share)
        return indices

    def take(self, draw: Callable[[], Any]) -> tuple[Any, float]:
        try:
            return draw(), self._shares[0]
        finally:
            if self._shares:  # also for a batch that failed to load: a loop may go on with the next one
                self._shares.popleft()


class Samples:
    """Deals samples: what torch's BatchSampler would batch. Without a batch size, one at a time."""

    def __init__(self, comm: Communicator, sampler: Any, batch: int | None, drop_last: bool) -> None:
        self._comm = comm
        self._sampler = sampler
        self._batch = batch
        self._size = comm.world * (batch or 1)
        self._drop_last = drop_last

    def __len__(self) -> int:
        return iterations(len(self._sampler), self._size, self._drop_last)

    def __iter__(self) -> Hands:
        # torch's BatchSampler begins with the sampler when it is asked for the first batch; without one torch does at
        # once. A sampler may draw random numbers then.
        return Hands(self._deal(_late(self._sampler) if self._batch else iter(self._sampler)))

    def _deal(self, source: Iterator[Any]) -> Iterator[Hand]:
        chunks: Iterable[Sequence[Any]]
        if type(self._sampler) is SequentialSampler:
            chunks = [range(len(self._sampler))]
        else:
            chunks = _agreed(self._comm, source, self._sampler)
        for group in groups(chunks, self._size, self._drop_last):
            indices, share = deal(group, self._comm.world, self._comm.rank)
            yield (indices if self._batch else indices[0]), share


class Batches:
    """Deals the batches of the user's own batch sampler, as they are."""

    def __init__(self, comm: Communicator, batch_sampler: Any) -> None:
        self._comm = comm
        self._batch_sampler = batch_sampler

    def __len__(self) -> int:
        return iterations(len(self._batch_sampler), self._comm.world, drop_last=False)

    def __iter__(self) -> Hands:
        return Hands(self._deal(iter(self._batch_sampler)))

    def _deal(self, source: Iterator[Any]) -> Iterator[Hand]:
        chunks = _agreed(self._comm, source, self._batch_sampler)
        for order, start, stop in groups(chunks, self._comm.world, drop_last=False):
            batches = order[start:stop]
            rows = [len(batch) if isinstance(batch, Sized) else 1 for batch in batches]
            yield deal_whole(batches, rows, self._comm.world, self._comm.rank)


class Order:
    """Whole numbers of one kind, in 8 bytes each: a list would take several times as much on every rank."""

    def __init__(self, values: Tensor, kind: type) -> None:
        self._values = values
        self._kind = kind

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, part: slice) -> list[Any]:
        if self._kind is Tensor:
            return list(self._values[part])
        values: list[Any] = self._values[part].tolist()
        return values if self._kind is int else [self._kind(value) for value in values]

    @staticmethod
    def kind(items: Sequence[Any]) -> type | None:
        """The kind of all items, if an `Order` can keep them."""
        kinds = set(map(type, items))
        kind = kinds.pop() if kinds else int
        if kinds:
            return None
        if kind is Tensor:
            return kind if all(item.dim() == 0 and item.dtype == torch.int64 for item in items) else None
        numpy = kind.__module__ == "numpy" and issubclass(kind, numbers.Integral)
        return kind if kind is int or numpy else None


def _late(items: Iterable[Any]) -> Iterator[Any]:
    yield from items


def _agreed(comm: Communicator, source: Iterator[Any], sampler: Any) -> Iterator[Sequence[Any]]:
    """What `source`, an iterator of `sampler`, gives on rank 0, on every rank. Collective.

    It comes in chunks, because a sampler may give more than its len() says, even without end. torch's own do not.
    """
    length, honest = max(len(sampler), 1), type(sampler).__module__ == Sampler.__module__
    while chunk := _from_leader(comm, list(itertools.islice(source, length))):
        yield chunk
        if honest:
            next(source, None)  # it may draw random numbers at its end
            return


def _from_leader(comm: Communicator, items: list[Any]) -> Sequence[Any]:
    with comm.counters.agreeing(), labelled("the order of an epoch"):
        count, kind = comm.broadcast_object((len(items), Order.kind(items)))
        if kind is None or not count:
            return list(comm.broadcast_object(items)) if count else []
        values = torch.tensor([int(item) for item in items]) if comm.rank == 0 else torch.empty(count, dtype=torch.long)
        order: Any = Order(comm.broadcast(values).wait(), kind)
        return order  # type: ignore[no-any-return]
