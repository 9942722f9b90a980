"""How a bucket goes through slots that may be smaller than it is. Pure arithmetic.

A *piece* is what one reduction carries: the same part of every owner's slice, laid end to end (or, where one rank or
every rank keeps the whole sum, a run of the bucket). A bucket that fits into a slot is one piece.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from sherd.errors import ConfigError
from sherd.layout.placement import BLOCK
from sherd.layout.slicing import Bucket, FlatBucket

PADDING = -1


class Run(NamedTuple):
    """Elements `[start, stop)` of an entry, or, if `entry` is PADDING, as many zeros."""

    entry: int
    start: int
    stop: int


class Piece(NamedTuple):
    """What one reduction carries, and which elements of the kept sum (a slice, or the whole bucket) it gives.

    `parts` lie end to end, one per owner, or one for all. They are equal in size, but those of whole layers are empty
    for all but their holder.
    """

    parts: tuple[tuple[Run, ...], ...]
    numel: int
    start: int
    stop: int


def largest_by_slice(bucket: Bucket, slot_numel: int) -> int:
    """Elements of the largest piece for a reduce-scatter."""
    if bucket.holder is not None:
        return largest_whole(bucket, slot_numel)
    return min(_step(slot_numel // bucket.world), bucket.slice_numel) * bucket.world


def largest_whole(bucket: Bucket, slot_numel: int) -> int:
    """Elements of the largest piece for an all-reduce."""
    return min(_step(slot_numel), bucket.numel)


def cut_by_slice(bucket: Bucket, slot_numel: int) -> tuple[Piece, ...]:
    """Pieces for a reduce-scatter: at most `slot_numel` elements, though at least a block per owner."""
    if bucket.holder is not None:
        before, after = ((),) * bucket.holder, ((),) * (bucket.world - 1 - bucket.holder)
        return tuple(piece._replace(parts=(*before, *piece.parts, *after)) for piece in cut_whole(bucket, slot_numel))
    step = _step(slot_numel // bucket.world)
    size = bucket.slice_numel
    pieces = []
    for start in range(0, size, step):
        stop = min(start + step, size)
        owners = range(0, bucket.world * size, size)
        parts = tuple(tuple(_runs(bucket, owner + start, owner + stop)) for owner in owners)
        pieces.append(Piece(parts, (stop - start) * bucket.world, start, stop))
    return tuple(pieces)


def cut_whole(bucket: Bucket, slot_numel: int) -> tuple[Piece, ...]:
    """Pieces for an all-reduce: at most `slot_numel` elements, though at least a block."""
    step = _step(slot_numel)
    cuts = [(start, min(start + step, bucket.numel)) for start in range(0, bucket.numel, step)]
    return tuple(Piece((tuple(_runs(bucket, start, stop)),), stop - start, start, stop) for start, stop in cuts)


def _step(numel: int) -> int:
    return max(numel // BLOCK * BLOCK, BLOCK)


def _runs(bucket: Bucket, low: int, high: int) -> Iterator[Run]:
    """What lies in `[low, high)` of a bucket, all slices laid end to end."""
    if not isinstance(bucket, FlatBucket):
        raise ConfigError(f"bucket {bucket.index} has placement {bucket.placement.value!r}; gradients are reduced flat")
    at = low
    position = max(bisect_right(bucket.begins, low) - 1, 0)
    while at < high:
        if position >= len(bucket.members):
            yield Run(PADDING, 0, high - at)
            return
        begin, numel = bucket.begins[position], bucket.entries[position].numel
        start, stop = at - begin, min(numel, high - begin)
        if start < stop:
            yield Run(bucket.members[position], start, stop)
            at = begin + stop
        gap = min(bucket.begins[position + 1], high) - at
        if gap > 0:
            yield Run(PADDING, 0, gap)
            at += gap
        position += 1
