"""Waiting for other ranks: spin briefly, then sleep, and check all the while that it still makes sense.

A peer whose process has ended, a peer that left or failed, and a peer that is merely late each lead to an error or a
warning that names it. A rank that has slept for a while writes its *stance* to the board: what it waits for, and the
calls it has made, so that ranks that wait in a circle are found (see `deadlock`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from sherd.comm.closing import CLOSED_MEANWHILE
from sherd.comm.host import futex
from sherd.comm.host.board import CHUNK_BITS, ERRORS, Board, State
from sherd.comm.host.operation import Operation
from sherd.comm.meeting.peers import Peers
from sherd.comm.waiting import deadlock, faults
from sherd.comm.waiting.deadlock import COLLECTIVE, RECV, SEND, Stance
from sherd.comm.waiting.patience import Stopwatch, limit
from sherd.config import CommOptions
from sherd.errors import CommClosed, CommError

# Each takes about 40 ns, so this is about 1 ms: longer than a peer needs for the next chunk of a stream.
# With a tenth of it, repeats of a 100 MB all-reduce on a noisy machine gave medians of 19 to 27 ms instead of 19 to 21.
SPINS = 25_000
# How long to sleep before looking for faults again; a dead peer is noticed within it.
LOOK_EVERY = 0.05
LOOK_EVERY_BUSY = 0.001
# How long a rank sleeps before it takes a stance, and how often it then looks for a deadlock.
CIRCLE_EVERY = 0.25

Made = tuple[int, list[int], list[int]]
"""Calls of a rank: its last collective, and its messages to and from every rank."""

_KINDS = (COLLECTIVE, RECV, SEND)
_COUNTS = 8  # generation, kind, peer, count, collectives, text, monotonic ns, whether it is in force; then the counts


class Waiter:
    """Waits on the board for one rank."""

    def __init__(self, board: Board, peers: Peers, options: CommOptions, spin: bool) -> None:
        self._board = board
        self._peers = peers
        self._options = options
        self._spins = SPINS if spin else 0
        self._owner = threading.get_ident()  # the thread that makes the calls
        self.made: Callable[[], Callable[[], Made] | None] = lambda: None
        """A weak reference to what counts the calls of this rank."""

    def until(
        self, indices: Sequence[int], target: int, meanwhile: Callable[[], int], operation: Operation | None = None
    ) -> None:
        """Return when every flag in `indices` has reached `target`, which `operation` needs.

        `meanwhile` is called between looks; it returns how many queues have operations under way, this one included.
        """
        words = self._board.words
        for index in indices:
            if words[index] >= target:
                continue
            for _ in range(self._spins):
                if words[index] >= target:
                    break
            else:
                break
        else:
            return
        self._sleep(indices, target, meanwhile, operation)
        for index in indices:
            if words[index] < target:
                try:
                    self._sleep_on(indices, target, meanwhile, operation)
                finally:
                    self._leave_stance()
                return

    def _sleep(
        self, indices: Sequence[int], target: int, meanwhile: Callable[[], int], operation: Operation | None
    ) -> None:
        # Nothing behind this operation in its queue can move before it does.
        busy = meanwhile() > (operation is not None and len(operation.queue) > 0)
        self._board.sleep(indices, target, LOOK_EVERY_BUSY if busy else LOOK_EVERY)

    def _sleep_on(
        self, indices: Sequence[int], target: int, meanwhile: Callable[[], int], operation: Operation | None
    ) -> None:
        """The first sleep was not enough."""
        board, words = self._board, self._board.words
        watch = Stopwatch()
        warn_at = self._options.warn_seconds
        circle_at = CIRCLE_EVERY
        while late := [index for index in indices if words[index] < target]:
            missing = [board.writer(index) for index in late]
            found = self._faults(missing)
            if found and any(words[index] < target for index in late):
                raise found.pop()
            waited = watch.seconds()
            if waited > circle_at and self._owner == threading.get_ident() and (made := self.made()) is not None:
                circle_at = waited + CIRCLE_EVERY
                # Every time: an operation that was moved on meanwhile may have slept too.
                kind = self._take_stance(late[0], target, operation, made(), waited)
                # A circle has a message in it: the rank that waits for that reports it.
                if kind != COLLECTIVE:
                    self._check_circle()
            if waited > limit(self._options.timeout):
                raise self._timed_out(missing, waited)
            if waited > warn_at:
                self._warn(missing, waited)
                warn_at = 2 * waited
            self._sleep(indices, target, meanwhile, operation)

    def use_here(self) -> None:
        """Calls now come from this thread; threads take turns."""
        self._owner = threading.get_ident()

    def check(self, needed: Sequence[int] = ()) -> None:
        """Raise if another rank has reported a fault, or one of those `needed` has left or ended."""
        if found := self._faults(needed):
            raise found.pop()

    # ---------------------------------------------------------------- stances

    def _take_stance(self, index: int, target: int, operation: Operation | None, made: Made, waited: float) -> str:
        """This rank has slept for a while until the flag at `index` reaches `target`; the kind of call it is in."""
        board, words = self._board, self._board.words
        start = board.stances[board.rank]
        collectives, sends, recvs = made
        kind, peer = board.purpose(index)
        text = board.text_number(operation.call, operation.site) if operation is not None and kind else 0
        fields = (kind, peer, target >> CHUNK_BITS, collectives, text, time.monotonic_ns() - int(1e9 * waited), 1)
        words[start] += 1  # odd: it is being written
        futex.fence()
        for at, value in enumerate((*fields, *sends, *recvs), start + 1):
            words[at] = value
        futex.fence()
        words[start] += 1
        return _KINDS[kind]

    def _leave_stance(self) -> None:
        """This rank goes on. The stance stays: see `deadlock`."""
        self._board.words[self._board.stances[self._board.rank] + 7] = 0

    def _check_circle(self) -> None:
        """Raise if this rank is part of a deadlock."""
        board = self._board
        stances = {r: stance for r in range(board.world) if (stance := self._stance_of(r)) is not None}
        ranks = deadlock.circle(board.rank, stances)
        if ranks:
            sides = deadlock.sides(ranks, stances, board.names)
            raise board.reported(faults.deadlocked(sides, [board.numbers[r] for r in sorted(ranks)]), State.DIVERGED)

    def _stance_of(self, rank: int) -> Stance | None:
        board, words = self._board, self._board.words
        start, world = board.stances[rank], board.world
        generation = words[start]
        futex.fence()
        line = list(words[start : start + _COUNTS + 2 * world])
        futex.fence()
        if generation == 0 or generation % 2 or words[start] != generation:
            return None
        _, kind, peer, count, collectives, text, *_ = line
        call = board.text(text, rank) if kind else board.call_text(rank, min(count, collectives))
        sends, recvs = line[_COUNTS : _COUNTS + world], line[_COUNTS + world :]
        return Stance(_KINDS[kind], peer, count, call, collectives, dict(enumerate(sends)), dict(enumerate(recvs)))

    # ---------------------------------------------------------------- what may have gone wrong

    def _faults(self, missing: Sequence[int]) -> list[CommError]:
        """Why it is useless to wait for `missing`: one error or none. In a list, so that no frame holds what it raises,
        whose traceback holds the frame."""
        failures = self._board.failures()
        state, _ = failures.pop(self._board.rank, (State.WELL, ""))
        if state == State.LEFT:
            return [CommClosed(CLOSED_MEANWHILE)]
        silent = [r for r in self._peers.dead() if r not in failures]
        if silent:
            # They may have said why between the two checks.
            failures = {r: said for r, said in self._board.failures().items() if r != self._board.rank}
            silent = [r for r in silent if r not in failures]
        if silent:
            return [self._lost({r: self._peers.how_it_ended(r) for r in silent})]
        for rank, (state, text) in failures.items():
            if state == State.FAILED or (state == State.LEFT and (rank in missing or text)):
                verb = "failed with" if state == State.FAILED else "left after"
                return [self._lost({rank: f"{verb} {text}" if text else "left"})]
            if state in ERRORS:
                words = text if state == State.DIVERGED else f"{self._board.names[rank]} reports: {text}"
                return [ERRORS[state](words, (self._board.numbers[rank],))]
        return []

    def _lost(self, ends: Mapping[int, str]) -> CommError:
        words, me = [self._activity_of(rank, end) for rank, end in ends.items()], self._board.rank
        mine = f"{self._board.names[me]} {self._board.last_activity(me)}"
        error = faults.lost(words, mine, [self._board.numbers[rank] for rank in ends])
        return self._board.reported(error, State.LOST_PEER)

    def _timed_out(self, missing: Sequence[int], seconds: float) -> CommError:
        late = [self._board.names[r] for r in missing]
        activities = [f"{name} {self._board.last_activity(r)}" for r, name in enumerate(self._board.names)]
        error = faults.timed_out(late, seconds, activities, [self._board.numbers[r] for r in missing])
        return self._board.reported(error, State.TIMED_OUT)

    def _warn(self, missing: Sequence[int], seconds: float) -> None:
        late = {self._board.numbers[r]: self._activity_of(r) for r in missing}
        call = self._board.last_activity(self._board.rank)
        faults.warn_late(self._board.names[self._board.rank], late, seconds, call, limit(self._options.timeout))

    def _activity_of(self, rank: int, end: str = "") -> str:
        name = f"{self._board.names[rank]} {end}" if end else self._board.names[rank]
        return f"{name}; it {self._board.last_activity(rank)}"
