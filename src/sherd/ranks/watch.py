"""Waiting until every rank has answered a command, failed, or run out of time."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from sherd.comm.meeting.peers import describe_exit
from sherd.ranks import worker
from sherd.ranks.process import Rank


@dataclass(frozen=True)
class Died:
    """Replaces the result of a rank that ended as `expected_exits` said (negative: by that signal)."""

    exitcode: int


@dataclass(frozen=True)
class Failure:
    """Why a rank failed, as text to follow "rank 3 ", and when (monotonic clock)."""

    story: str
    when: float


@dataclass
class Outcome:
    """The outcome of a command on every rank. A rank in none of the three was still busy when time ran out."""

    answered: set[int] = field(default_factory=set)
    died: dict[int, Died] = field(default_factory=dict)  # as expected
    failed: dict[int, Failure] = field(default_factory=dict)

    def busy(self, ranks: Sequence[Rank]) -> list[Rank]:
        done = self.answered | self.died.keys() | self.failed.keys()
        return [rank for rank in ranks if rank.rank not in done]

    def stories(self) -> dict[int, str]:
        """Why ranks failed, the first one first: it is often the cause of the others."""
        order = sorted(self.failed, key=lambda number: self.failed[number].when)
        return {number: self.failed[number].story for number in order}

    def fail(self, number: int, story: str, when: float | None = None) -> None:
        self.answered.discard(number)
        self.failed[number] = Failure(story, time.monotonic() if when is None else when)

    def results(self, ranks: Sequence[Rank]) -> list[Any]:
        """One result per rank, in rank order. A result that cannot be read back is a failure too."""
        values: list[Any] = []
        for rank in ranks:
            try:
                values.append(self.died[rank.rank] if rank.rank in self.died else rank.result())
            except Exception as error:
                self.fail(
                    rank.rank,
                    f"returned a result that cannot be unpickled by the caller ({type(error).__name__}: {error}); "
                    "its class must be importable there too",
                )
        return values


def watch(ranks: Sequence[Rank], timeout: float, grace: float, expected: Mapping[int, int]) -> Outcome:
    """Collect the answers of `ranks` to the command they were just given, and forward what they print.

    `expected` maps the ranks that must die to their exit codes. Once a rank has failed, the others have `grace` seconds
    to fail by themselves, so that they are reported too. So has a rank that should die but returned.
    """
    outcome = Outcome()
    limit, hurried = time.monotonic() + timeout, False
    while True:
        for rank in ranks:  # before the first sleep too: nothing wakes us for what has already happened
            _note(rank, outcome, expected)
        undead = [rank for rank in expected if rank not in outcome.died and rank not in outcome.failed]
        busy = outcome.busy(ranks)
        if not busy and not undead:
            break
        if not hurried and (outcome.failed or not busy):
            limit, hurried = min(limit, time.monotonic() + grace), True
        left = limit - time.monotonic()
        if left <= 0:
            break
        _sleep(ranks, left)
    for number in expected.keys() & outcome.answered:
        outcome.fail(number, f"returned, but expected_exits says that it {describe_exit(expected[number])}")
    return outcome


def _sleep(ranks: Sequence[Rank], seconds: float) -> None:
    """Until a rank answers, prints or ends."""
    wait([waker for rank in ranks for waker in rank.wakers()], None if seconds == math.inf else seconds)


def _note(rank: Rank, outcome: Outcome, expected: Mapping[int, int]) -> None:
    """Record what the rank did since the last look."""
    number = rank.rank
    code = rank.look()  # before hear(): then everything that a dead rank sent has arrived
    answer = rank.hear()
    rank.forward()
    if answer == worker.RAISED:
        when, story = rank.story()
        outcome.fail(number, story, when)
    elif answer:
        outcome.answered.add(number)
    if code is None or number in outcome.died or number in outcome.failed:
        return
    if expected.get(number) == code:
        outcome.answered.discard(number)
        outcome.died[number] = Died(code)
    else:
        # Peers may have noticed a killed rank before we did, but cannot have caused it: it failed first.
        when = 0.0 if code < 0 else time.monotonic()
        late = " after it had returned" if number in outcome.answered else ""
        wanted = f", but expected_exits says that it {describe_exit(expected[number])}" if number in expected else ""
        outcome.fail(number, f"{describe_exit(code)}{late}{wanted}\n{rank.stack()}", when)
