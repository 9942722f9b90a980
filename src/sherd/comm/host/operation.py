"""One operation under way on the host transport, and the headers by which ranks announce and compare operations.

The steps of an operation are a generator: what comes before its first `yield` is done when it is issued, and each
`yield` names the flags it needs to go on: `(indices, target)`. So an operation reads from top to bottom, and can be
issued without waiting, completed later, or moved on while the rank waits for something else.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from torch import Tensor

from sherd.comm.calls import Call, Site
from sherd.comm.handle import Handle
from sherd.comm.host.board import CHUNK_BITS, HEADERS, Board, State
from sherd.comm.waiting import faults
from sherd.errors import Diverged

Need = tuple[Sequence[int], int]
"""Flags, and the value all of them must have reached."""
NOTHING: Need = ((), 0)
Steps = Generator[Need, None, None]


class Completes(Protocol):
    """A scheduler, as seen from here."""

    def complete(self, operation: Operation) -> None: ...

    def try_complete(self, operation: Operation) -> bool: ...


class Operation(Handle):
    """A handle that a scheduler moves on, step by step. `number` counts operations of the same kind, from 1."""

    __slots__ = ("_scheduler", "base", "call", "finished", "need", "number", "queue")

    site: Site = (0, 0)  # of a message, and of a collective that is more than one step
    posted: bool = False  # a part of this rank's contribution can be read by the others
    staged_all: bool = False  # all of it can, or needs no staging chunk
    passed: bool = False  # all that is left is to wait until others have read it

    def __init__(self, scheduler: Completes, number: int, call: Call) -> None:
        self._scheduler = scheduler
        self.number = number
        self.base = number << CHUNK_BITS  # progress when none of its chunks is through
        self.call = call
        self.finished = False
        self.need: Need = NOTHING
        self.queue: deque[Operation]

    @abstractmethod
    def step(self) -> None:
        """Go on to the next need, the present one being met, or to the end."""

    def wait(self) -> Tensor:
        if not self.finished:
            self._scheduler.complete(self)
        return self.result

    def done(self) -> bool:
        return self.finished or self._scheduler.try_complete(self)


class SteppedOperation(Operation):
    """An operation that is a generator."""

    __slots__ = ("locations", "passed", "posted", "site", "staged_all", "steps", "used")

    def __init__(self, scheduler: Completes, number: int, call: Call, site: Site) -> None:
        super().__init__(scheduler, number, call)
        self.site = site
        self.posted = self.staged_all = self.passed = False
        self.locations: list[tuple[int, int, int]] | None = None  # of each rank's contribution, once checked
        self.used = 0  # chunks of its movements so far
        self.steps: Steps

    def step(self) -> None:
        try:
            self.need = next(self.steps)
        except StopIteration:
            self.finished = True


Stream = Callable[[SteppedOperation], Steps]
"""stream(operation): its steps, where it takes no short path."""


class Headers:
    """One rank's view of the headers and flags of a board."""

    def __init__(self, board: Board, check: bool) -> None:
        self.board = board
        self.check = check
        others = [r for r in range(board.world) if r != board.rank]
        self.posted_by_peers = tuple(board.posted[r] for r in others)
        self.done_by_peers = tuple(board.done[r] for r in others)
        self.my_posted, self.my_done = board.posted[board.rank], board.done[board.rank]
        # A rank reads its own headers too: it must not overwrite one whose operation it has not completed.
        self.done_by_all = (*self.done_by_peers, self.my_done)
        self.free = HEADERS - 1  # the last operation whose header is known to be free

    def is_free(self, number: int) -> bool:
        """Whether no rank needs the header that operation `number` would overwrite."""
        if number > self.free:
            lowest = min(self.board.words[index] for index in self.done_by_all)
            self.free = (lowest >> CHUNK_BITS) + HEADERS - 1
        return number <= self.free

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
        sides = [f"{self.board.names[r]} called {self.board.call_text(r, o.number)}" for r in ranks]
        error = faults.diverged(o.number, sides, [self.board.numbers[r] for r in ranks])
        return self.board.reported(error, State.DIVERGED)
