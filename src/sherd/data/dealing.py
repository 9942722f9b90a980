"""Who gets what: pure arithmetic on the order of an epoch.

An *order* is what one process would read, one after the other. It is cut into *groups*, one per iteration; a group is
dealt to the ranks in consecutive parts. The *share* of a rank is what its part counts, so that the mean over the ranks
of share times (mean over the part) is the mean over the group: 1 where all parts are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple


class Group(NamedTuple):
    """What all ranks together take in one iteration: `order[start:stop]`."""

    order: Sequence[Any]
    start: int
    stop: int


def groups(chunks: Iterable[Sequence[Any]], size: int, drop_last: bool) -> Iterator[Group]:
    """Cut an order that comes in chunks, whatever their lengths, into groups of `size`; the last may be smaller."""
    rest: Sequence[Any] = ()
    for chunk in chunks:
        order = [*rest, *chunk[:]] if rest else chunk
        whole = len(order) // size * size
        for start in range(0, whole, size):
            yield Group(order, start, start + size)
        rest = order[whole:]
    if rest and not drop_last:
        yield Group(rest, 0, len(rest))


def iterations(count: int, size: int, drop_last: bool) -> int:
    """How many groups there are."""
    return count // size if drop_last else -(-count // size)


def part(count: int, world: int, rank: int) -> tuple[int, int]:
    """From where to where `rank` takes of `count` things: sizes differ by one at most."""
    least, more = divmod(count, world)
    start = rank * least + min(rank, more)
    return start, start + least + (rank < more)


def share_of(counts: Sequence[int], rank: int) -> float:
    """What the part of `rank` counts, where the ranks have parts of `counts`."""
    total = sum(counts)
    return counts[rank] * len(counts) / total if total else 0.0


def deal(group: Group, world: int, rank: int) -> tuple[list[Any], float]:
    """The part of `rank` and its share. Who gets none takes the last of the group once more, for nothing."""
    order, start, stop = group
    count = stop - start
    first, last = part(count, world, rank)
    if first == last:
        return list(order[stop - 1 : stop]), 0.0
    return list(order[start + first : start + last]), (last - first) * world / count


def deal_whole(batches: Sequence[Any], rows: Sequence[int], world: int, rank: int) -> tuple[Any, float]:
    """The batch of `rank` among at most `world` of them, and its share by `rows`.

    Who gets none takes the last one too, for nothing.
    """
    mine = batches[min(rank, len(batches) - 1)]
    return mine, share_of([*rows, *(0 for _ in range(world - len(batches)))], rank)
