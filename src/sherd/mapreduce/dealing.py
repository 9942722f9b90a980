"""Who computes which chunk: each rank asks for the next one when it is done with its last, so a slow rank gets fewer.

The numbers are tickets of the job's store. They are hints (see `comm.meeting.tickets`): a number that is lost is
noticed when ranks tell each other what they did, and computed then. One that was given out twice is an error.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from sherd.comm import Communicator
from sherd.comm.meeting.tickets import Tickets

if TYPE_CHECKING:
    from typing_extensions import Self


class Dealer:
    """Deals the chunks 0 to `chunks` - 1 to the ranks; None: there is no end. All ranks give it the same `name`."""

    def __init__(self, comm: Communicator, name: str, chunks: int | None) -> None:
        self._comm = comm
        self._chunks = sys.maxsize if chunks is None else chunks
        self._tickets = Tickets(comm.store, name) if comm.store is not None and comm.world > 1 else None

    def numbers(self) -> Iterator[int]:
        """The chunks of this rank, each drawn when it is asked for."""
        seen = -1
        for number in self._drawn():
            # Numbers ascend, unless someone else wrote to the store: then it must not keep this rank busy for ever.
            if not seen < number < self._chunks:
                return
            seen = number
            yield number

    def end(self) -> None:
        """Deal no more: something failed for good."""
        if self._tickets is not None:
            self._tickets.end()

    def _drawn(self) -> Iterable[int]:
        if self._tickets is None:  # alone, or without a common store: in turn
            return itertools.count(self._comm.rank, self._comm.world)
        return iter(self._tickets.draw, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._tickets is not None:
            self._tickets.close(forget=error is None and self._comm.rank == 0)
