"""Layers whose parts are on several ranks: their norms, for optimizers that scale layers as a whole.

Each rank has the norms of the blocks of its parts. All of them, of all layers, are gathered once per step, and every
rank adds those of a layer in block order: the same bits as of the whole layer, wherever it is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.optimizer.runs import Part
from sherd.layout.placement import BLOCK, padded
from sherd.optim.layerwise import Layers, Norms, totals


class LayerTable:
    """Where the blocks of these buckets are in what ranks gather: slice by slice, the same place on every rank.

    It depends on nothing that only one rank knows: a layer that this rank has no part of, or that nobody has used, has
    its place too.
    """

    def __init__(self, buckets: BucketList, chosen: Iterable[Bucket]) -> None:
        self._tables: list[tuple[dict[Bucket, int], int]] = []  # where buckets begin, and the length of all
        chosen = list(chosen)
        for ranks in buckets.groups:  # in one order on all ranks; those of a group hold the same buckets
            starts, length = {}, 0
            for bucket in chosen:
                if bucket.ranks == ranks:
                    starts[bucket] = length
                    length += bucket.described.slice_numel // BLOCK
            if length:
                self._tables.append((starts, length))

    def norms(self, blocks: Mapping[Part, Tensor]) -> dict[Part, tuple[float, float]]:
        """By part, the norms of its layer. Collective."""
        under_way = []
        for starts, length in self._tables:
            comm = next(iter(starts)).comm
            table = torch.zeros(2, length, dtype=torch.float64)
            for part, own in blocks.items():
                if part.bucket in starts:
                    first = starts[part.bucket] + part.offset // BLOCK
                    table[:, first : first + own.shape[1]] = own
            with comm.counters.agreeing():
                under_way.append((starts, length, comm.all_gather(table, what="the norms of layers")))
        whole: dict[Bucket, Tensor] = {}
        for starts, length, handle in under_way:
            gathered = handle.wait().view(-1, 2, length)
            for bucket, start in starts.items():
                # Its slices lie in a bucket in the order of the ranks.
                its = gathered[:, :, start : start + bucket.described.slice_numel // BLOCK]
                whole[bucket] = its.transpose(0, 1).reshape(2, -1)
        return totals({part: _of_layer(part, whole.get(part.bucket)) for part in blocks})


class PartsOfLayers(Layers):
    """What the tensors of an inner optimizer are parts of. Where `table` is None, they are whole layers, but flat."""

    def __init__(self, parts: Mapping[Tensor, Part], table: LayerTable | None) -> None:
        self._parts = parts
        self._table = table

    def dimensions(self, tensor: Tensor) -> int:
        return len(self._parts[tensor].member.entry.shape)

    def norms(self, blocks: Mapping[Tensor, Tensor]) -> Norms:
        if self._table is None:
            return super().norms(blocks)
        found = self._table.norms({self._parts[tensor]: own for tensor, own in blocks.items()})
        return {tensor: found[self._parts[tensor]] for tensor in blocks}


def _of_layer(part: Part, blocks: Tensor | None) -> Tensor:
    """Of the blocks of a bucket, those of the layer that this is a part of."""
    if blocks is None:  # no layer of the bucket has elements
        return torch.zeros(2, 0, dtype=torch.float64)
    first = part.member.offset // BLOCK
    return blocks[:, first : first + padded(part.member.entry.numel) // BLOCK]
