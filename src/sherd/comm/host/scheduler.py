"""Runs the steps of operations.

Operations wait in queues: one for the collectives, one for each direction to each peer. In a queue they complete in the
order in which they were issued, which for collectives is the same on all ranks. One that only has to wait until others
have read its contribution has *passed*: it is out of its queue. While a rank waits for anything, it does its part of
whatever else is at the head of a queue, in every communicator of its thread, so ranks do not deadlock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from sherd.comm.closing import CLOSED, unusable
from sherd.comm.host import futex
from sherd.comm.host.board import CHUNK_BITS, ERRORS, Board, State
from sherd.comm.host.operation import Operation
from sherd.comm.host.waiting import Waiter
from sherd.comm.waiting.progress import move_everything, take_part
from sherd.errors import CommClosed, CommError, Diverged, PeerLost, TimedOut

_KNOWN_TO_OTHERS = (CommClosed, Diverged, PeerLost, TimedOut)  # they were told, or see it themselves
_STATES = {error: state for state, error in ERRORS.items()}


class Scheduler:
    """The operations of one rank that are under way."""

    def __init__(self, board: Board, waiter: Waiter, lock: threading.RLock) -> None:
        self._board = board
        self._words, self._states, self._all_well = board.words, board.states, board.all_well_states
        self._waiter = waiter
        self._collectives: deque[Operation] = deque()
        self._queues = [self._collectives]
        self._passed: deque[Operation] = deque()  # kept, as others still read their tensors
        self._broken: str | None = None
        self.lock = lock
        take_part(self)

    def new_queue(self) -> deque[Operation]:
        """A queue for the messages in one direction."""
        queue: deque[Operation] = deque()
        self._queues.append(queue)
        return queue

    def check(self) -> None:
        """Before anything: raise if this communicator can no longer be used."""
        if self._broken is not None:
            raise unusable(self._broken)
        if self._states != self._all_well:
            try:
                self._waiter.check()
            except BaseException as error:
                self.abandon(error)
                raise

    def admit(self) -> None:
        """Before a collective: check, and complete what would be in the way."""
        if self._broken is not None or self._states != self._all_well:
            self.check()
        # The remaining chunks of a collective that is not all staged would come after those of the new one.
        queue = self._collectives
        while queue and not queue[-1].staged_all:
            self._advance(queue[0])
        while self._passed and self._is_met(self._passed[0]):
            self._passed.popleft()

    def add(self, operation: Operation) -> Operation:
        """Take a collective whose contribution is posted."""
        operation.queue = self._collectives
        self._collectives.append(operation)
        return operation

    def issue(self, operation: Operation) -> Operation:
        """Run a collective until its first contribution is posted, and without waiting where that is possible."""
        self.add(operation)
        self._step(operation)
        # While all staging chunks are taken: do this rank's part of what is under way, then wait for a free one.
        while not operation.posted:
            head = self._collectives[0]
            if not self._is_met(head):
                self._wait(*head.need, head)
            else:
                self._step(head)
        return operation

    def issue_message(self, operation: Operation, queue: deque[Operation]) -> Operation:
        """Run a send or receive as far as it goes without waiting and without overtaking another."""
        operation.queue = queue
        queue.append(operation)
        self._move(queue)
        return operation

    def complete(self, operation: Operation) -> None:
        """Run `operation`, and those ahead of it in its queue, to the end."""
        if self._broken is not None:
            raise unusable(self._broken)
        while not operation.finished:
            self._advance(operation if operation.passed else operation.queue[0])

    def try_complete(self, operation: Operation) -> bool:
        """Move on without waiting; whether `operation` is finished."""
        self.check()
        self.move_all()
        if operation.passed and not operation.finished and self._is_met(operation):
            self._step(operation)
        return operation.finished

    def abandon(self, why: BaseException | str) -> None:
        """Drop everything; later calls raise an error that says why, and so do other ranks if they cannot know it."""
        if self._broken is not None:
            return
        self._broken = str(why)  # not the error: its traceback keeps everything alive
        # Before the tensors of what is under way are released: others may be reading them.
        if isinstance(why, BaseException) and not isinstance(why, _KNOWN_TO_OTHERS):
            self._board.leave_word(State.FAILED, f"{type(why).__name__}: {why}")
        for queue in (*self._queues, self._passed):
            queue.clear()

    def fail(self, error: CommError) -> None:
        """Give up because of what happened beyond this host, and tell the ranks of this host."""
        if self._board is not CLOSED:
            self._board.leave_word(_STATES.get(type(error), State.FAILED), str(error))
            self.abandon(error)

    def close(self) -> None:
        """Drop everything, and the board: handles keep this object alive."""
        self.abandon("it was closed")
        self._board = self._waiter = self._words = self._states = CLOSED

    def last_collective(self) -> int:
        """The number of the last one that was issued."""
        posted = self._words[self._board.posted[self._board.rank]] >> CHUNK_BITS
        return max(posted, self._collectives[-1].number) if self._collectives else posted

    # ---------------------------------------------------------------- private

    def _advance(self, operation: Operation) -> None:
        """One step of an operation, or wait for what it needs: it may have moved on then, and need something else."""
        words = self._words
        indices, target = operation.need
        for index in indices:
            if words[index] < target:
                self._wait(indices, target, operation)
                return
        self._step(operation)

    def _wait(self, indices: Sequence[int], target: int, operation: Operation) -> None:
        try:
            self._waiter.until(indices, target, move_everything, operation)
        except BaseException as error:
            self.abandon(error)
            raise

    def _step(self, operation: Operation) -> None:
        """The part of `operation` up to its next need, which is known to be met."""
        if not futex.STORES_IN_ORDER:
            futex.fence()
        passed = operation.passed
        try:
            operation.step()
        except BaseException as error:
            self.abandon(error)
            raise
        if not passed and (operation.finished or operation.passed):
            operation.queue.popleft()
            if not operation.finished:
                self._passed.append(operation)

    def _is_met(self, operation: Operation) -> bool:
        words = self._words
        indices, target = operation.need
        for index in indices:  # noqa: SIM110 - a generator costs more than the look itself
            if words[index] < target:
                return False
        return True

    def _move(self, queue: deque[Operation]) -> None:
        """Do what can be done in a queue without waiting."""
        while queue and self._is_met(queue[0]):
            self._step(queue[0])

    def move_all(self) -> int:
        """Do what can be done without waiting; the number of queues that are not empty: only their heads can move."""
        left = 0
        for queue in self._queues:
            if queue:
                self._move(queue)
                if queue:
                    left += 1
        return left
