"""The stances of the ranks of a host, on the board: what each rank that has slept for a while is waiting for."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sherd.comm.host import futex
from sherd.comm.host.board import CHUNK_BITS, Board, State
from sherd.comm.host.operation import Operation
from sherd.comm.waiting import deadlock, faults
from sherd.comm.waiting.deadlock import COLLECTIVE, RECV, SEND, Stance

Made = tuple[int, list[int], list[int]]
"""Calls of a rank: its last collective, and its messages to and from every rank."""

_KINDS = (COLLECTIVE, RECV, SEND)
_COUNTS = 8  # generation, kind, peer, count, collectives, text, monotonic ns, whether it is in force; then the counts


class Stances:
    """One rank's view of the stances."""

    def __init__(self, board: Board, names: Sequence[str], numbers: Sequence[int]) -> None:
        self._board = board
        self._names = names
        self._numbers = numbers

    def take(self, index: int, target: int, operation: Operation | None, made: Made, waited: float) -> str:
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

    def leave(self) -> None:
        """This rank goes on. The stance stays: see `deadlock`."""
        self._board.words[self._board.stances[self._board.rank] + 7] = 0

    def check(self) -> None:
        """Raise if this rank is part of a deadlock."""
        board = self._board
        stances = {r: stance for r in range(board.world) if (stance := self._read(r)) is not None}
        ranks = deadlock.circle(board.rank, stances)
        if ranks:
            sides = deadlock.sides(ranks, stances, self._names)
            raise board.reported(faults.deadlocked(sides, [self._numbers[r] for r in sorted(ranks)]), State.DIVERGED)

    def _read(self, rank: int) -> Stance | None:
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
