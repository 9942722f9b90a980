"""From one layout to another: which runs of elements move where.

The two may differ in world, buckets, order and placement; they must describe the same parameters, matched by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sherd.errors import ConfigError
from sherd.layout.shard_layout import ShardLayout
from sherd.layout.slicing import Segment


class Move(NamedTuple):
    """`length` consecutive elements of the parameter `entry`, from a place in one layout to a place in another.

    Offsets count within slices. Source and destination may be the same owner.
    """

    entry: str
    src_owner: int
    src_bucket: int
    src_offset: int
    dst_owner: int
    dst_bucket: int
    dst_offset: int
    length: int


def moves(src: ShardLayout, dst: ShardLayout, *, dst_owner: int | None = None) -> Iterator[Move]:
    """Every move from `src` to `dst`, or only those to `dst_owner`, in the order of `dst`: owner, bucket, offset.

    Together they write each element of each parameter once, and no padding. Runs that are adjacent at both ends are one
    move.
    """
    _match(src, dst)  # at the call, not at the first move
    owners = range(dst.world) if dst_owner is None else (dst_owner,)
    return (move for owner in owners for segment in dst.segments(owner) for move in _fill(src, dst, segment))


def _fill(src: ShardLayout, dst: ShardLayout, segment: Segment) -> Iterator[Move]:
    """The moves that fill one segment of `dst`."""
    name = dst.entries[segment.entry].name
    entry = src.index(name)
    _, bucket, owner, offset, region, _ = segment
    last: Move | None = None
    for start, length in region.runs():
        for place in src.places(entry, start, start + length):
            if last is not None and (last.src_owner, last.src_offset + last.length) == (place.owner, place.offset):
                last = last._replace(length=last.length + place.length)
            else:
                if last is not None:
                    yield last
                last = Move(name, place.owner, place.bucket, place.offset, owner, bucket, offset, place.length)
            offset += place.length
    if last is not None:
        yield last


def _match(src: ShardLayout, dst: ShardLayout) -> None:
    theirs = {entry.name: entry for entry in src.entries}
    ours = {entry.name: entry for entry in dst.entries}
    if theirs.keys() != ours.keys():
        raise ConfigError(
            f"the layouts describe different parameters: {_some(theirs.keys() - ours.keys())} only in the source, "
            f"{_some(ours.keys() - theirs.keys())} only in the destination; build both from the same model"
        )
    for name, entry in ours.items():
        for what, found, expected in (
            ("shape", theirs[name].shape, entry.shape),
            ("order", theirs[name].order, entry.order),
            ("dtype", theirs[name].dtype, entry.dtype),
        ):
            if found != expected:
                raise ConfigError(
                    f"parameter {name!r} has {what} {found} in the source and {expected} in the destination; "
                    f"elements are moved, not converted: build both layouts with the same {what}"
                )


def _some(names: set[str]) -> str:
    listed = ", ".join(map(repr, sorted(names)[:5]))
    return f"{listed} and {len(names) - 5} more" if len(names) > 5 else listed or "none"
