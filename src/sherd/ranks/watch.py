"""Waiting until every rank has answered a command, failed, or run out of time.

And the error of a failed run: what every rank reported, the first to fail first.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from sherd.comm.meeting.peers import describe_exit
from sherd.errors import RankFailed
from sherd.ranks import worker
from sherd.ranks.process import Rank, read_stacks


@dataclass(frozen=True)
class Died:
    """Replaces the result of a rank that ended as `expected_exits` said (negative: by that signal)."""

    exitcode: int


@dataclass
class Outcome:
    """The outcome of a command on every rank. A rank in none of the three was still busy when time ran out."""

    answered: set[int] = field(default_factory=set)
    died: dict[int, Died] = field(default_factory=dict)  # as expected
    failed: dict[int, tuple[float, str]] = field(default_factory=dict)
    """when (monotonic clock), and why, as text to follow "rank 3 \""""

    def busy(self, ranks: Sequence[Rank]) -> list[Rank]:
        done = self.answered | self.died.keys() | self.failed.keys()
        return [rank for rank in ranks if rank.rank not in done]

    def stories(self) -> dict[int, str]:
        """Why ranks failed, the first one first: it is often the cause of the others."""
        order = sorted(self.failed, key=lambda number: self.failed[number][0])
        return {number: self.failed[number][1] for number in order}

    def fail(self, number: int, story: str, when: float | None = None) -> None:
        self.answered.discard(number)
        self.failed[number] = (time.monotonic() if when is None else when, story)

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
        when, story = rank.result()  # why the function did not return
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


# ---------------------------------------------------------------- the error


class RanksTimedOut(RankFailed):
    """Ranks did not finish in time. `failures` maps each of them to its Python stacks.

    A `RankFailed`, so that one `except` catches every failure of a run; not a `TimedOut`, which a communicator raises
    *inside* a rank about its peers.
    """


def failure(ranks: Sequence[Rank], outcome: Outcome, *, doing: str, timeout: float, grace: float) -> RankFailed | None:
    """The error for this outcome, None if all is well. Asks the ranks that are still busy for their stacks."""
    busy = outcome.busy(ranks)
    if not outcome.failed and not busy:
        return None
    stacks = read_stacks(busy)
    idle = [f"rank {number} had finished {doing}\n" for number in sorted(outcome.answered)]
    idle += [f"rank {number} had died, as expected\n" for number in sorted(outcome.died)]
    if not outcome.failed:
        head = f"{_ranks(stacks)} of {len(ranks)} did not finish {doing} in {timeout:g} s and had to be ended."
        stuck = _sections(stacks, "was still busy; its Python stacks:")
        return RanksTimedOut("\n\n".join([head, *stuck, *idle]).rstrip(), stacks)
    stories = outcome.stories()
    head = f"{_ranks(stories)} of {len(ranks)} failed while {doing}."
    told = [f"rank {number} {_indented(story)}" for number, story in stories.items()]
    ended = _sections(stacks, f"did not fail, was still busy {grace:g} s later and had to be ended; its Python stacks:")
    return RankFailed("\n\n".join([head, *told, *ended, *idle]).rstrip(), stories)


def _ranks(numbers: Mapping[int, str]) -> str:
    listed = ", ".join(map(str, numbers))
    return f"rank {listed}" if len(numbers) == 1 else f"ranks {listed}"


def _sections(stacks: Mapping[int, str], words: str) -> list[str]:
    return [f"rank {number} {words}\n{textwrap.indent(stack.rstrip(), '    ')}" for number, stack in stacks.items()]


def _indented(story: str) -> str:
    first, _, rest = story.rstrip().partition("\n")
    return f"{first}\n{textwrap.indent(rest, '    ')}".rstrip()
