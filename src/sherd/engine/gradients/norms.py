"""Gradient norms that do not depend on who owns what.

A norm is a sum over blocks: the norm of each block is taken by its owner, all owners' are gathered, and every rank adds
their squares in block order in fp64. The same blocks in the same order give the same bits, whatever the cut.

Block norms also find NaN and infinity at the cost of one pass over the gradient while it is still in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from sherd.comm import Communicator
from sherd.layout.placement import BLOCK
from sherd.layout.shard_layout import ShardLayout


class BlockNorms:
    """The block norms of one owner's slices, and the norm of everybody's."""

    def __init__(self, layout: ShardLayout) -> None:
        blocks = [bucket.slice_numel // BLOCK for bucket in layout.buckets]
        self._table = torch.zeros(sum(blocks), dtype=torch.float64)
        self._parts = torch.split(self._table, blocks)
        self._layout = layout
        self._squared: float | None = None  # the sum of the squares, until something is measured

    def grown(self, layout: ShardLayout) -> BlockNorms:
        """The same norms, with room for the buckets that `layout` has more."""
        norms = BlockNorms(layout)
        norms._table[: self._table.numel()] = self._table
        return norms

    def measure(self, bucket: int, slice: Tensor) -> None:
        """Take the norms of a bucket's slice; its padding is zero."""
        # In fp32: in fp64 it takes 20 times as long, and what 256 elements lose is far below what the gradient lost.
        rows = slice.view(-1, BLOCK)
        wide = torch.float32 if slice.dtype in (torch.float16, torch.bfloat16) else None
        self._parts[bucket].copy_(torch.linalg.vector_norm(rows, dim=1, dtype=wide))
        self._squared = None

    def forget(self) -> None:
        """There is no gradient."""
        self._table.zero_()
        self._squared = None

    def finite(self) -> bool:
        """Whether all of this owner's blocks have a finite norm."""
        # The sum is faster than a test of each, and wanted too; where it is not finite, squaring may be the reason.
        return math.isfinite(self._sum_of_squares()) or bool(torch.isfinite(self._table).all())

    def _sum_of_squares(self) -> float:
        if self._squared is None:
            self._squared = float(torch.dot(self._table, self._table))
        return self._squared

    def squares(self, factors: Mapping[int, float]) -> list[Tensor]:
        """The squared norms of this owner's blocks, bucket by bucket; those of some buckets are to be multiplied."""
        return [part.square() * factors.get(bucket, 1.0) ** 2 for bucket, part in enumerate(self._parts)]

    def squared(self, factors: Mapping[int, float]) -> float:
        """Their sum."""
        if all(factor == 1.0 for factor in factors.values()):
            return self._sum_of_squares()
        return sum(float(squares.sum()) for squares in self.squares(factors))

    @cached_property
    def _order(self) -> Tensor:
        return _block_order(self._layout)

    def total(self, comm: Communicator) -> float:
        """The 2-norm of the whole gradient, the same bits on every rank. Collective."""
        with comm.counters.agreeing():
            everybody = comm.all_gather(self._table).wait()
        # cumsum adds one after the other; sum() does not, and its order depends on the number of threads.
        squares = everybody[self._order].square_()
        return float(squares.cumsum(0)[-1].sqrt()) if squares.numel() else 0.0


def _block_order(layout: ShardLayout) -> Tensor:
    """Where each block of each entry lies in the owners' tables, laid end to end."""
    starts, total = [], 0
    for bucket in layout.buckets:
        starts.append(total)
        total += bucket.slice_numel // BLOCK
    order = torch.empty(layout.total_blocks, dtype=torch.int64)
    for owner in range(layout.world):
        for segment in layout.segments(owner):
            first = layout.first_block(segment.entry) + segment.first_block
            place = owner * total + starts[segment.bucket] + segment.offset // BLOCK
            order[first : first + segment.blocks] = torch.arange(place, place + segment.blocks)
    return order
