"""Loaders whose order sherd does not deal: an IterableDataset, or a sampler that is already distributed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch
from torch import Tensor

from sherd.comm import Communicator, labelled
from sherd.data.dealing import Seat, deal_whole, iterations
from sherd.data.scheme import ShardingScheme, Take, length
from sherd.errors import SherdError


class Splitting(ShardingScheme):
    """Every rank reads the whole stream and takes every `world`-th batch."""

    def __init__(self, comm: Communicator, seat: Seat, drop_last: bool) -> None:
        super().__init__(comm)
        self._seat = seat
        self._drop_last = drop_last

    def epoch(self, sampling: Any) -> Take:
        seat, ended = self._seat, False

        def take(draw: Callable[[], Any]) -> tuple[Any, float, int]:
            nonlocal ended
            batches: list[Any] = []
            while len(batches) < seat.world and not ended:
                try:
                    batches.append(draw())
                except StopIteration:
                    ended = True
            if not batches or (self._drop_last and ended):
                raise StopIteration
            batch, weight = deal_whole(batches, [rows(batch) for batch in batches], seat)
            return batch, weight, rows(batch)

        return take

    def length(self, own: int) -> int:
        return iterations(own, self._comm.world, self._drop_last)

    def seed(self, drawn: int) -> int:
        """Rank 0's, the same on every rank: workers that shuffle must give every rank the same stream. Collective."""
        with self._comm.counters.agreeing(), labelled("the seed of a stream"):
            return int(self._comm.broadcast(torch.tensor([drawn])).wait())


class Agreeing(ShardingScheme):
    """Every rank reads its own part; in each iteration the ranks agree on who still has data.

    `sized` are objects with lengths: in an epoch where these are equal on all ranks, so are the parts, and there is
    nothing to agree on.
    """

    def __init__(self, comm: Communicator, seat: Seat, sized: Sequence[Any] = ()) -> None:
        super().__init__(comm)
        self._seat = seat
        self._sized = sized

    def epoch(self, sampling: Any) -> Take:
        return _Agreeing(self._comm, self._seat, self._sized).take


class _Agreeing:
    def __init__(self, comm: Communicator, seat: Seat, sized: Sequence[Any]) -> None:
        self._comm = comm
        self._seat = seat
        self._sized = sized
        self._even: bool | None = None
        self._ended = self._over = False
        self._last: Any = None
        self._taken = 0

    def take(self, draw: Callable[[], Any]) -> tuple[Any, float, int]:
        if self._even is None:
            self._even = self._compare()
        if self._even:
            batch = draw()
            return batch, 1.0, rows(batch)
        if self._over:
            raise StopIteration
        return self._agree(draw)

    def _compare(self) -> bool:
        """Whether the lengths are equal on all ranks. Collective."""
        if not self._sized:
            return False
        lengths = torch.tensor([length(thing) for thing in self._sized])
        with self._comm.counters.agreeing(), labelled("the lengths of the ranks' samplers"):
            everybody = self._comm.all_gather(lengths).wait().view(self._comm.world, -1)
        return bool((everybody == everybody[0]).all() and (everybody >= 0).all())

    def _agree(self, draw: Callable[[], Any]) -> tuple[Any, float, int]:
        try:
            batch = draw() if not self._ended else self._last
        except StopIteration:
            self._ended, batch = True, self._last
        if not self._ended:
            self._taken += 1
            self._last = _copy_of(batch)
        mine = torch.tensor([0 if self._ended else rows(batch), int(not self._ended), self._taken])
        with self._comm.counters.agreeing(), labelled("which ranks still have data"):
            found = self._comm.all_gather(mine).wait().view(self._comm.world, -1).t().tolist()
        counts, going, taken = found
        if not any(going):
            self._over = True
            raise StopIteration
        empty = [rank for rank, batches in enumerate(taken) if not batches]
        if empty:
            raise SherdError(
                f"rank {self._comm.rank}: ranks {empty} have no batch at all in this epoch while others do, so they "
                f"cannot take part in its steps; give every rank at least one batch"
            )
        return batch, self._seat.weight(counts), rows(batch)


def rows(batch: Any) -> int:
    """The length of the first tensor in a batch of any structure; 1 if there is none."""
    tensor = _first_tensor(batch)
    return 1 if tensor is None or tensor.dim() == 0 else tensor.shape[0]


def _first_tensor(thing: Any) -> Tensor | None:
    if isinstance(thing, Tensor):
        return thing
    if isinstance(thing, Mapping):
        inside: Any = thing.values()
    elif isinstance(thing, Sequence) and not isinstance(thing, (str, bytes)):
        inside = thing
    else:
        return None
    return next(filter(lambda found: found is not None, map(_first_tensor, inside)), None)


def _copy_of(batch: Any) -> Any:
    """A copy of a batch, to repeat: the loop may remove items from the one that it gets."""
    return copy.copy(batch) if isinstance(batch, (MutableMapping, MutableSequence)) else batch
