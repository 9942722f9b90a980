"""The order of an epoch, agreed on in pieces: a sampler may yield more than fits into memory, or never end.

The ranks agree on a piece at the point where each of them takes the same batch, never where torch's iterator happens to
draw: how far it draws ahead depends on the number of workers, which may differ between ranks.
"""

from __future__ import annotations

import itertools
import numbers
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from sherd.comm import Communicator, labelled
from sherd.data.scheme import length
from sherd.errors import CommError, Diverged

SAMPLES, BATCHES = 1 << 16, 1 << 12
"""How many samples, or batches of a batch sampler, are agreed on at a time: drawn in milliseconds, stored in half a
megabyte, and exchanged so rarely that it costs nothing noticeable."""


class LeaderOrder:
    """On every rank, what `source`, an iterator of `sampler`, yields on rank 0: at most `most` items at a time.

    `size` items make one batch for all ranks; `ahead` is how many batches this rank may draw before it takes the first.
    """

    def __init__(
        self, comm: Communicator, sampler: Any, source: Iterator[Any], *, most: int, size: int, ahead: int
    ) -> None:
        self._comm = comm
        self._sampler = sampler
        self._source = source
        self._most = most
        self._size = size
        self._ahead = ahead
        self._agreed = 0  # items
        self._ended = False
        self._pieces: deque[Sequence[Any]] = deque()  # agreed on, but not asked for yet

    def __iter__(self) -> Iterator[Sequence[Any]]:
        while self._pieces or not self._ended:
            if not self._pieces:
                self._agree()  # before the first batch is taken, for prefetching
            yield self._pieces.popleft()
        next(self._source, None)  # it may draw random numbers at its end

    def before(self, batch: int) -> None:
        """Every rank is about to take its batch number `batch`, counted from 0: agree on all that any of them may
        draw by then. Collective where another piece is due."""
        while not self._ended and self._agreed < (batch + 1 + self._ahead) * self._size:
            self._agree()

    def _agree(self) -> None:
        """Take the next piece. Collective."""
        position, limit, last = self._agreed, *self._next_limit()
        items = list(itertools.islice(self._source, limit))  # on all ranks, so that their random states advance alike
        with self._comm.counters.agreeing(), labelled(f"the order of an epoch from its item {position} on"):
            header = (position, len(items), last or len(items) < limit, Compact.kind(items))
            leaders, count, self._ended, kind = self._comm.broadcast_object(header)
            if leaders != position:
                raise Diverged(
                    f"the ranks are out of sync in an epoch: rank 0 is about to agree on the order of its samples from "
                    f"item {leaders} on, rank {self._comm.rank} from item {position} on; take the same batches "
                    f"of the same loader on every rank",
                    ranks=(0, self._comm.rank),
                )
            self._pieces.append(self._from_leader(items, count, kind))
            if not position and not self._ended:
                self._ahead = int(self._comm.all_reduce(torch.tensor([self._ahead]), op="max").wait())
        self._agreed += count

    def _next_limit(self) -> tuple[int, bool]:
        """How many items to draw next, and whether these are certainly the last.

        Never more than the sampler's length leaves: at its end it may draw random numbers, which must not happen in a
        loop that stops early. A sampler may yield more than its length, or never end; torch's own do not.
        """
        says = length(self._sampler)
        left = says - self._agreed
        if left <= 0:
            left = max(says, 1) if says >= 0 else self._most
        honest = type(self._sampler).__module__ == Sampler.__module__
        return min(left, self._most), honest and 0 <= says <= self._agreed + self._most

    def _from_leader(self, items: list[Any], count: int, kind: str) -> Sequence[Any]:
        if not count:
            return []
        if not kind:
            return list(self._comm.broadcast_object(items))
        leads = self._comm.rank == 0
        values = torch.tensor([int(item) for item in items]) if leads else torch.empty(count, dtype=torch.long)
        piece: Any = Compact(self._comm.broadcast(values).wait(), kind)
        return piece  # type: ignore[no-any-return]


class Compact:
    """Integers of one kind, in 8 bytes each: a list would take several times as much on every rank.

    The kind is a string, since a type is not plain data: "int", "Tensor", or numpy's letter for one of its types.
    """

    def __init__(self, values: Tensor, kind: str) -> None:
        self._values = values
        self._kind = kind

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, part: slice) -> list[Any]:
        if self._kind == "Tensor":
            return list(self._values[part])
        values: list[Any] = self._values[part].tolist()
        return values if self._kind == "int" else list(map(_numpy_kind(self._kind), values))

    @staticmethod
    def kind(items: Sequence[Any]) -> str:
        """The kind of all items, or "" if a `Compact` cannot hold them."""
        kinds = set(map(type, items))
        kind = kinds.pop() if kinds else int
        if kinds:
            return ""
        if kind is Tensor:
            return "Tensor" if all(item.dim() == 0 and item.dtype == torch.int64 for item in items) else ""
        if kind.__module__ == "numpy" and issubclass(kind, numbers.Integral):
            return str(items[0].dtype.char)
        return "int" if kind is int else ""


def _numpy_kind(kind: str) -> Any:
    import numpy

    if kind not in tuple(numpy.typecodes["AllInteger"]):
        raise CommError(f"rank 0 sent the order of an epoch as integers of an unknown kind, {kind!r}", (0,))
    return numpy.dtype(kind).type
