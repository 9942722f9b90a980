"""Announcing operations to the other ranks, and comparing what they announced."""

from __future__ import annotations

from collections.abc import Sequence

from sherd.comm.host.board import CHUNK_BITS, HEADERS, Board, State
from sherd.comm.host.operation import Operation
from sherd.comm.waiting import faults
from sherd.errors import Diverged


class Headers:
    """One rank's view of the headers and flags of a board."""

    def __init__(self, board: Board, names: Sequence[str], numbers: Sequence[int], check: bool) -> None:
        self.board = board
        self.check = check
        others = [r for r in range(board.world) if r != board.rank]
        self.posted_by_peers = tuple(board.posted[r] for r in others)
        self.done_by_peers = tuple(board.done[r] for r in others)
        self.my_posted, self.my_done = board.posted[board.rank], board.done[board.rank]
        # A rank reads its own headers too: it must not overwrite one whose operation it has not completed.
        self.done_by_all = (*self.done_by_peers, self.my_done)
        self._names = names
        self._numbers = numbers
        self._free = HEADERS - 1  # the last operation whose header is known to be free

    def is_free(self, number: int) -> bool:
        """Whether no rank needs the header that operation `number` would overwrite."""
        if number > self._free:
            lowest = min(self.board.words[index] for index in self.done_by_all)
            self._free = (lowest >> CHUNK_BITS) + HEADERS - 1
        return number <= self._free

    def compare(self, o: Operation) -> list[tuple[int, int, int]]:
        """Raise unless all ranks, which have posted, made the same call; the location of each contribution."""
        board = self.board
        if self.check:
            for r in range(board.world):
                if board.fingerprint(r, o.number) != o.call.fingerprint:
                    raise self.diverged(o, r)
        return [board.location(r, o.number) for r in range(board.world)]

    def diverged(self, o: Operation, other: int) -> Diverged:
        ranks = sorted((self.board.rank, other))
        sides = [f"{self._names[r]} called {self.board.call_text(r, o.number)}" for r in ranks]
        error = faults.diverged(o.number, sides, [self._numbers[r] for r in ranks])
        self.board.leave_word(State.DIVERGED, str(error))
        faults.emit_fault(error)
        return error
