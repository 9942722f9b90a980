"""Which rank gets what: pure arithmetic on the order of an epoch.

An *order* is the sequence of samples that one process would read. It is cut into *groups*, one per iteration; a group
is dealt to the ranks in consecutive parts. The *weight* of a part makes the mean over the ranks of weight x (mean over
the part) equal to the mean over the group: 1 where all parts have the same size. Where ranks train in teams, the ranks
and the group are those of a team.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

Group = tuple[Sequence[Any], int, int]
"""(order, start, stop): all ranks together take `order[start:stop]` in one iteration."""


def groups(chunks: Iterable[Sequence[Any]], size: int, drop_last: bool) -> Iterator[Group]:
    """Cut an order, which comes in chunks of any length, into groups of `size`; the last may be smaller."""
    rest: Sequence[Any] = ()
    for chunk in chunks:
        order = [*rest, *chunk[:]] if rest else chunk
        whole = len(order) // size * size
        for start in range(0, whole, size):
            yield order, start, start + size
        rest = order[whole:]
    if rest and not drop_last:
        yield rest, 0, len(rest)


def iterations(count: int, size: int, drop_last: bool) -> int:
    """How many groups there are."""
    return count // size if drop_last else -(-count // size)


def part(count: int, world: int, rank: int) -> tuple[int, int]:
    """The range of `count` items that `rank` gets. Sizes differ by at most one."""
    least, more = divmod(count, world)
    start = rank * least + min(rank, more)
    return start, start + least + (rank < more)


class Seat(NamedTuple):
    """The place of a rank among those that share a loader."""

    rank: int
    world: int
    team: range
    """the ranks that train together with it, itself included: its weight counts against theirs"""

    def weight(self, counts: Sequence[int]) -> float:
        """The weight of the part of this rank, where the parts of all ranks have these sizes."""
        total = sum(counts[rank] for rank in self.team)
        return counts[self.rank] * len(self.team) / total if total else 0.0


def deal(group: Group, seat: Seat) -> tuple[list[Any], float]:
    """The part of a rank and its weight. A rank that gets nothing repeats the last of the group, with weight 0."""
    order, start, stop = group
    count, world, team = stop - start, seat.world, seat.team
    first, last = part(count, world, seat.rank)
    if first == last:
        return list(order[stop - 1 : stop]), 0.0
    together = part(count, world, team[-1])[1] - part(count, world, team[0])[0]
    return list(order[start + first : start + last]), (last - first) * len(team) / together


def deal_whole(batches: Sequence[Any], rows: Sequence[int], seat: Seat) -> tuple[Any, float]:
    """The batch of a rank among at most as many as there are ranks, and its weight by `rows`.

    A rank that gets none repeats the last one, with weight 0.
    """
    mine = batches[min(seat.rank, len(batches) - 1)]
    return mine, seat.weight([*rows, *(0 for _ in range(seat.world - len(batches)))])
