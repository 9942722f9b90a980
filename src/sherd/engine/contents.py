"""Everything that a rank owns, the same under every strategy: what a checkpoint writes and `describe` counts.

Every element of the model and of its optimizer state belongs to one rank: the owner of its segment, whoever updates it.
So the pieces of all ranks together are the whole, once.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from sherd.engine.engine import Engine
from sherd.engine.optimizer.portions import is_per_element
from sherd.layout.placement import Region
from sherd.layout.slicing import Segment


class Role(str, enum.Enum):
    """What a piece is of."""

    PARAMETER = "parameters"
    MASTER = "masters"
    STATE = "optimizer state"
    BUFFER = "buffers"


class Piece(NamedTuple):
    """Consecutive elements of one parameter, or of one tensor of its state, or a whole buffer."""

    name: str
    key: Any
    """which tensor of the state; "" for a parameter or buffer"""
    role: Role
    region: Region
    """which elements of the flattened tensor"""
    tensor: Tensor
    """these elements, flat, where they are kept"""


class Scalar(NamedTuple):
    """What an optimizer keeps for a parameter besides tensors of its shape, such as a step counter."""

    name: str
    key: Any
    value: Any


def pieces(engine: Engine) -> Iterator[Piece]:
    """What this rank owns: parameters, frozen ones too, optimizer state and, on the first rank that holds it, each
    buffer. Not collective."""
    sliced = engine.store.updates_slices
    for bucket in engine.buckets.every:
        for member, segment in bucket.segments(bucket.comm.rank):
            start = segment.offset if sliced else member.offset + segment.region.start
            owned = bucket.values.owned.detach()[start : start + segment.numel]
            yield Piece(member.name, "", Role.PARAMETER, segment.region, owned)
            if bucket.values.master is not None:
                master = bucket.values.master[start : start + segment.numel]
                yield Piece(member.name, "", Role.MASTER, segment.region, master)
    for name, of, key, value in _state(engine):
        if of is not None:
            yield Piece(name, key, Role.STATE, of.region, value)
    for name, buffer in engine.inventory.model.named_buffers():
        if engine.groups[engine.inventory.groups.ranks_of(name)].rank == 0:
            yield Piece(name, "", Role.BUFFER, Region.of(0, buffer.numel()), buffer.detach().reshape(-1))


def scalars(engine: Engine) -> Iterator[Scalar]:
    """What this rank's optimizer keeps besides: yielded by the owner of a parameter's first element."""
    for name, of, key, value in _state(engine):
        if of is None:
            yield Scalar(name, key, value)


def _state(engine: Engine) -> Iterator[tuple[str, Segment | None, Any, Any]]:
    """The state of each parameter by key: elements of a segment, or, with None, everything else."""
    mine = {m: segment for bucket in engine.buckets.every for m, segment in bucket.segments(bucket.comm.rank)}
    for kept in (part for shard in engine.shards.values() for part in shard.kept()):
        member, segment = kept.member, mine.get(kept.member)
        first = member.bucket.comm.rank == (member.bucket.holder or 0)
        leads = segment.region.start == 0 if segment is not None else first and not member.entry.numel
        for key, value in kept.state.items():
            if not is_per_element(value, kept.shape):
                if leads:
                    yield member.name, None, key, value
            elif segment is not None:
                flat = member.entry.flattened(value.detach()) if kept.whole else value.detach()
                start = segment.region.start - kept.start
                yield member.name, segment, key, flat[start : start + segment.numel]
