"""Runs the steps of operations.

Collectives complete in the order in which they were issued, which is the same on all ranks; so a rank that waits in one
of them has done its part of all earlier ones, and nobody waits in a circle. Sends and receives stand beside them and
move on whenever the rank waits for anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sherd.comm.host import futex
from sherd.comm.host.board import Board
from sherd.comm.host.operation import Operation
from sherd.comm.host.waiting import Waiter
from sherd.errors import CommClosed


class Scheduler:
    """The operations of one rank that are under way."""

    def __init__(self, board: Board, waiter: Waiter) -> None:
        self._board = board
        self._words = board.words
        self._waiter = waiter
        self._collectives: deque[Operation] = deque()
        self._messages: list[Operation] = []
        self._broken: BaseException | str | None = None

    def check(self) -> None:
        """Before anything: raise if this communicator is of no more use."""
        if self._broken is not None:
            raise self._closed()
        if not self._board.all_well():
            self._guarded_check()

    def admit(self) -> None:
        """Before a collective: check, and finish what would be in the way."""
        self.check()
        # A collective that is not all staged would find its next chunks behind the new one's.
        if self._collectives and not self._collectives[-1].staged_all:
            self.complete(self._collectives[-1])

    def add(self, operation: Operation) -> Operation:
        """Take a collective whose contribution is posted."""
        self._collectives.append(operation)
        return operation

    def issue(self, operation: Operation) -> Operation:
        """Run a collective until its first contribution is posted, and without waiting where that is possible."""
        self._step(operation)
        if not operation.posted:
            # The staging chunks are all taken: do this rank's part of what is under way, then wait for a free one.
            while self._collectives:
                self.complete(self._collectives[0])
            while not operation.posted:
                self._wait(*operation.need)
                self._step(operation)
        self._collectives.append(operation)
        return operation

    def issue_message(self, operation: Operation) -> Operation:
        """Run a send or receive as far as it goes without waiting."""
        if not self._move(operation):
            self._messages.append(operation)
        return operation

    @property
    def has_messages(self) -> bool:
        """Whether sends or receives are under way, which later ones must not overtake."""
        return bool(self._messages)

    def complete(self, operation: Operation) -> None:
        """Run `operation`, and the collectives issued before it, to the end."""
        if self._broken is not None:
            raise self._closed()
        if self._messages and operation in self._messages:
            self._run(operation)
            if operation in self._messages:  # it may have been moved to its end while this rank waited for it
                self._messages.remove(operation)
            return
        while not operation.finished:
            self._run(self._collectives[0])
            self._collectives.popleft()

    def try_complete(self, operation: Operation) -> bool:
        """Move on without waiting; whether `operation` is finished."""
        if self._broken is not None:
            raise self._closed()
        self._move_messages()
        while self._collectives and self._move(self._collectives[0]):
            self._collectives.popleft()
        return operation.finished

    def abandon(self, why: BaseException | str) -> None:
        """Drop everything; later calls get an error that says why."""
        if self._broken is None:
            self._broken = why
        self._collectives.clear()
        self._messages.clear()

    # ---------------------------------------------------------------- private

    def _run(self, operation: Operation) -> None:
        words = self._words
        while not operation.finished:
            indices, target = operation.need
            for index in indices:
                if words[index] < target:
                    self._wait(indices, target)
                    break
            self._step(operation)

    def _wait(self, indices: Sequence[int], target: int) -> None:
        try:
            self._waiter.until(indices, target, self._move_messages if self._messages else None)
        except BaseException as error:
            self.abandon(error)
            raise

    def _step(self, operation: Operation) -> None:
        """The part of `operation` up to its next need, which is known to be met."""
        if not futex.STORES_IN_ORDER:
            futex.fence()
        try:
            operation.step()
        except BaseException as error:
            self.abandon(error)
            raise

    def _move(self, operation: Operation) -> bool:
        words = self._words
        while not operation.finished:
            indices, target = operation.need
            for index in indices:
                if words[index] < target:
                    return False
            self._step(operation)
        return True

    def _move_messages(self) -> bool:
        """Move sends and receives on; whether any are left."""
        for operation in list(self._messages):
            if self._move(operation) and operation in self._messages:
                self._messages.remove(operation)
        return bool(self._messages)

    def _guarded_check(self) -> None:
        try:
            self._waiter.check()
        except BaseException as error:
            self.abandon(error)
            raise

    def _closed(self) -> CommClosed:
        return CommClosed(f"this communicator cannot be used any more: {self._broken}")
