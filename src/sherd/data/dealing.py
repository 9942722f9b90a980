"""Which rank gets what: pure arithmetic on the order of an epoch.

An *order* is the sequence of samples that one process would read. It is cut into *groups*, one per iteration; a group
is dealt to the ranks in consecutive parts. The *weight* of a part makes the mean over the ranks of weight x (mean over
the part) equal to the mean over the group: 1 where all parts have the same size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

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


def weight_of(counts: Sequence[int], rank: int) -> float:
    """The weight of the part of `rank`, where the parts have these sizes."""
    total = sum(counts)
    return counts[rank] * len(counts) / total if total else 0.0


def deal(group: Group, world: int, rank: int) -> tuple[list[Any], float]:
    """The part of `rank` and its weight. A rank that gets nothing repeats the last of the group, with weight 0."""
    order, start, stop = group
    count = stop - start
    first, last = part(count, world, rank)
    if first == last:
        return list(order[stop - 1 : stop]), 0.0
    return list(order[start + first : start + last]), (last - first) * world / count


def deal_whole(batches: Sequence[Any], rows: Sequence[int], world: int, rank: int) -> tuple[Any, float]:
    """The batch of `rank` among at most `world` of them, and its weight by `rows`.

    A rank that gets none repeats the last one, with weight 0.
    """
    mine = batches[min(rank, len(batches) - 1)]
    return mine, weight_of([*rows, *(0 for _ in range(world - len(batches)))], rank)
