"""Norms of gradients of which a rank keeps slices, with the bits that torch gives for whole ones.

Clipping asks for the norm of each gradient. Most gradients lie in one rank's slice: it takes their norms, and sends one
number for each. Only those that a boundary between ranks cuts are put together, on every rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sherd.comm import Communicator
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.layout.slicing import Segment


def norms_at_owners(comm: Communicator, members: Sequence[TrackedParameter], order: Any) -> tuple[Tensor, ...] | None:
    """The norms of these summed gradients; None, on every rank, if it is as well to gather them. Collective."""
    segments = [member.segments() for member in members]
    cut = [at for at, its in enumerate(segments) if len(its) > 1]
    if not _pays(comm, members, segments, cut):
        return None
    own = [at for at, its in enumerate(segments) if len(its) == 1 and its[0].owner == comm.rank]
    norms = members[0].bucket.slice.new_zeros(len(members))
    if own:
        wholes = [members[at].entry.shaped(part) for at in own for part, _ in members[at].own_parts()]
        norms[own] = torch.stack([*torch._foreach_norm(wholes, order)])
    parts = [part for at in cut for part, _ in members[at].own_parts()]
    filled = [len(members)] * comm.world
    places = [[_placed(segment, filled) for segment in segments[at]] for at in cut]
    row = torch.cat([norms, *parts, norms.new_zeros(max(filled) - filled[comm.rank])])
    rows = comm.all_gather(row, what=_what(members, order)).wait().view(comm.world, -1)
    found = [rows[its[0].owner, at].clone() for at, its in enumerate(segments)]
    if cut:
        wholes = [
            members[at].entry.shaped(torch.cat([rows[owner, begin:end] for owner, begin, end in its]))
            for at, its in zip(cut, places, strict=True)
        ]
        for at, norm in zip(cut, torch._foreach_norm(wholes, order), strict=True):
            found[at] = norm
    return tuple(found)


def _pays(
    comm: Communicator, members: Sequence[TrackedParameter], segments: Sequence[Sequence[Segment]], cut: Sequence[int]
) -> bool:
    """Whether these can be sent in one table, and most elements need not be."""
    dtype = members[0].bucket.sum_dtype
    if dtype.is_complex:  # their norms are of another one
        return False
    for member, its in zip(members, segments, strict=True):
        bucket = member.bucket
        if bucket.comm is not comm or not bucket.summed or bucket.sum_dtype is not dtype or not its:
            return False
    return 2 * sum(members[at].entry.numel for at in cut) <= sum(member.entry.numel for member in members)


def _what(members: Sequence[TrackedParameter], order: Any) -> str:
    """For ranks to compare: norms of other gradients of the same shapes would not be noticed."""
    names = "\n".join(member.name for member in members)
    return f"{order}-norms of gradients, {zlib.crc32(names.encode()):08x}"


def _placed(segment: Segment, filled: list[int]) -> tuple[int, int, int]:
    """The owner of a segment, and where it begins and ends in what that owner sends."""
    begin = filled[segment.owner]
    filled[segment.owner] = end = begin + segment.numel
    return segment.owner, begin, end
