"""One operation under way on the host transport.

The steps of an operation are a generator: what comes before its first `yield` is done when it is issued, and each
`yield` names the flags it needs to go on: `(indices, target)`. So an operation reads from top to bottom, and can be
issued without waiting, completed later, or moved on while the rank waits for something else.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Generator, Sequence
from typing import Protocol

from torch import Tensor

from sherd.comm.calls import Call, Site
from sherd.comm.handle import Handle
from sherd.comm.host.board import CHUNK_BITS
from sherd.comm.host.memory import PRIVATE

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

    __slots__ = ("_scheduler", "base", "call", "finished", "need", "number", "posted", "queue", "staged_all")

    site: Site = (0, 0)  # of a message, and of a collective that is more than one step

    def __init__(self, scheduler: Completes, number: int, call: Call) -> None:
        self._scheduler = scheduler
        self.number = number
        self.base = number << CHUNK_BITS  # progress when none of its chunks is through
        self.call = call
        self.finished = False
        self.posted = False  # a part of this rank's contribution can be read by the others
        self.staged_all = False  # all of it can, or needs no staging chunk
        self.need: Need = NOTHING
        self.queue: deque[Operation]

    @abstractmethod
    def step(self) -> None:
        """Go on to the next need, the present one being met, or to the end."""

    def wait(self) -> Tensor:
        if not self.finished:
            self._scheduler.complete(self)
        assert self.result is not None
        return self.result

    def done(self) -> bool:
        return self.finished or self._scheduler.try_complete(self)


class SteppedOperation(Operation):
    """An operation that is a generator."""

    __slots__ = ("locations", "site", "steps", "used")

    def __init__(self, scheduler: Completes, number: int, call: Call, site: Site) -> None:
        super().__init__(scheduler, number, call)
        self.site = site
        self.locations: list[tuple[int, int, int]] | None = None  # of each rank's contribution, once checked
        self.used = 0  # chunks of its movements so far
        self.steps: Steps

    def is_private(self, rank: int) -> bool:
        """Whether a rank lends its private memory."""
        return self.locations is not None and self.locations[rank][0] == PRIVATE

    def step(self) -> None:
        try:
            self.need = next(self.steps)
        except StopIteration:
            self.finished = True
