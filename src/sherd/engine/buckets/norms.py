"""Gradient norms that do not depend on which rank owns what.

A norm is a sum over blocks: each owner computes the norms of its blocks, they are gathered, and every rank adds their
squares in block order in fp64. The same blocks in the same order give the same bits, wherever the slices are cut.

Block norms also detect NaN and infinity, at the cost of one pass over the gradient while it is still in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from sherd.comm import Communicator
from sherd.engine.buckets.bucket import Bucket
from sherd.layout import slicing
from sherd.layout.norms import added
from sherd.layout.placement import BLOCK
from sherd.layout.shard_layout import ShardLayout


class NormTable:
    """The block norms of this rank's part of `buckets`, and the norm over all ranks.

    The buckets fill in the block norms. `layout` has the buckets of all ranks, and the order in which blocks are added.
    The tables of ranks that hold or own less are padded with zeros.
    """

    def __init__(self, buckets: Sequence[Bucket], layout: ShardLayout, rank: int) -> None:
        blocks = [_blocks(bucket.described, rank) for bucket in buckets]
        self.rank = rank
        self._layout = layout
        self._starts, self._length = _starts(layout)
        self.norms = torch.zeros(self._length, dtype=torch.float64)
        for bucket, part in zip(buckets, torch.split(self.norms[: sum(blocks)], blocks), strict=True):
            if hasattr(bucket, "norms"):  # it was in an earlier table
                part.copy_(bucket.norms)
            bucket.norms = part

    def total(self, comm: Communicator) -> float:
        """The 2-norm of the whole gradient, the same bits on every rank. Collective."""
        with comm.counters.agreeing():
            gathered = comm.all_gather(self.norms).wait()
        return float(added(gathered[self._order]))

    @cached_property
    def _order(self) -> Tensor:
        """The index of each block of each parameter in the ranks' concatenated tables."""
        order = torch.empty(self._layout.total_blocks, dtype=torch.int64)
        for rank in range(self._layout.world):
            starts = self._starts[rank if len(self._starts) > 1 else 0]
            for segment in self._layout.segments(rank):
                first = self._layout.first_block(segment.entry) + segment.first_block
                place = rank * self._length + starts[segment.bucket] + segment.offset // BLOCK
                order[first : first + segment.blocks] = torch.arange(place, place + segment.blocks)
        return order


def _starts(layout: ShardLayout) -> tuple[list[dict[int, int]], int]:
    """By rank, where each bucket begins in its table, and the length of the longest; one for all if they are alike."""
    alike = all(bucket.ranks is None and bucket.holder is None for bucket in layout.buckets)
    found, length = [], 0
    for rank in range(1 if alike else layout.world):
        starts, total = {}, 0
        for bucket in layout.buckets:
            if bucket.owner_of(rank) is not None:
                starts[bucket.index] = total
                total += _blocks(bucket, rank)
        found.append(starts)
        length = max(length, total)
    return found, length


def _blocks(bucket: slicing.Bucket, rank: int) -> int:
    owner = bucket.owner_of(rank)
    return 0 if owner is None else bucket.owned_numel(owner) // BLOCK


def squares(bucket: Bucket, left: float) -> Tensor:
    """The squared norms of this rank's blocks of a bucket before clipping, which kept the fraction `left` of it."""
    return bucket.norms.square() * (bucket.scaled / left) ** 2
