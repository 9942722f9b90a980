"""The error of a failed run: what every rank reported, the first to fail first."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from sherd.errors import RankFailed
from sherd.ranks.process import Rank, read_stacks
from sherd.ranks.watch import Outcome


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
