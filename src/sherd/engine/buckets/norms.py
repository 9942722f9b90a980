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
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.layout.placement import BLOCK, padded


class NormTable:
    """The block norms of this rank's part of `buckets`, and the norm over all ranks.

    The buckets fill in the block norms. `parameters` lists their members in the order in which blocks are added.
    """

    def __init__(self, buckets: Sequence[Bucket], parameters: Sequence[TrackedParameter], world: int) -> None:
        blocks = [bucket.described.slice_numel // BLOCK for bucket in buckets]
        self.norms = torch.zeros(sum(blocks), dtype=torch.float64)
        for bucket, part in zip(buckets, torch.split(self.norms, blocks), strict=True):
            if hasattr(bucket, "norms"):  # it was in an earlier table
                part.copy_(bucket.norms)
            bucket.norms = part
        self._buckets, self._parameters, self._world = buckets, parameters, world

    def total(self, comm: Communicator) -> float:
        """The 2-norm of the whole gradient, the same bits on every rank. Collective."""
        with comm.counters.agreeing():
            gathered = comm.all_gather(self.norms).wait()
        # cumsum adds in order; sum() does not, and its order depends on the number of threads.
        squares = gathered[self._order].square_()
        return float(squares.cumsum(0)[-1].sqrt()) if squares.numel() else 0.0

    @cached_property
    def _order(self) -> Tensor:
        """The index of each block of each parameter in the owners' concatenated tables."""
        starts, total = {}, 0
        for bucket in self._buckets:
            starts[bucket] = total
            total += bucket.described.slice_numel // BLOCK
        firsts, blocks = {}, 0
        for member in self._parameters:
            firsts[member] = blocks
            blocks += padded(member.entry.numel) // BLOCK
        order = torch.empty(blocks, dtype=torch.int64)
        for owner in range(self._world):
            for bucket in self._buckets:
                for member, segment in bucket.segments(owner):
                    first = firsts[member] + segment.first_block
                    place = owner * total + starts[bucket] + segment.offset // BLOCK
                    order[first : first + segment.blocks] = torch.arange(place, place + segment.blocks)
        return order


def squares(bucket: Bucket, left: float) -> Tensor:
    """The squared norms of this rank's blocks of a bucket before clipping, which kept the fraction `left` of it."""
    return bucket.norms.square() * (bucket.scaled / left) ** 2
