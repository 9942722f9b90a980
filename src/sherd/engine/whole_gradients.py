"""Gradients with room for a whole local one.

Contributions can be added up in it, and are reduced where they lie. What comes after a bucket was reduced goes through
the ring and is added to its sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sherd.comm import Communicator, Handle
from sherd.engine.entry import dtype_of
from sherd.engine.flat import carve, numel_by_dtype
from sherd.engine.gradients import Reduction, RingGradients
from sherd.engine.layout import ShardLayout
from sherd.engine.pieces import Piece, cut_whole
from sherd.engine.placement import BLOCK, padded
from sherd.engine.slicing import Bucket


class WholeGradients(RingGradients):
    """A whole local gradient per rank, reduced into the slice that this rank owns."""

    _filled: list[bool]

    def take(self, entry: int, gradient: Tensor, factor: float) -> None:
        if self.summed[self._homes[entry]]:
            super().take(entry, gradient, factor)
            return
        view = self.views[entry]
        if self._filled[entry]:
            view.add_(gradient, alpha=factor)
        elif factor != 1.0:
            torch.mul(gradient, factor, out=view)
        else:
            view.copy_(gradient)
        self._filled[entry] = True

    def launch(self, bucket: int, op: str) -> None:
        if self.summed[bucket]:
            super().launch(bucket, op)
            return
        for member in self.layout.buckets[bucket].members:
            if not self._filled[member]:
                self.views[member].zero_()
            self._filled[member] = False
        handle = self._reduce_in_place(bucket, op)
        self.summed[bucket] = True
        self._start(Reduction(bucket, handle, self.sums[bucket], None, last=True))

    def forget(self) -> None:
        super().forget()
        self._filled = [False] * len(self._filled)

    def local(self, bucket: int) -> bool:
        return super().local(bucket) or any(self._filled[member] for member in self.layout.buckets[bucket].members)

    def _memory_for(self, comm: Communicator, layout: ShardLayout) -> dict[str, Tensor]:
        # Where peers can read it in place, if there is such memory.
        sizes = numel_by_dtype(layout, self._room)
        if not (comm.shares_memory and self._device.type == "cpu"):
            return self._zeros(sizes)
        return {d: comm.shared_buffers(size, dtype=dtype_of(d))[comm.rank] for d, size in sizes.items()}

    def _allocate(self, comm: Communicator, layout: ShardLayout) -> tuple[list[Tensor], list[Tensor]]:
        self._buckets = carve(self.memory, layout, lambda bucket: bucket.numel)
        self._filled = [False] * len(layout.entries)
        self._homes = [layout.bucket_of(entry).index for entry in range(len(layout.entries))]
        self.views = [self._view(entry) for entry in range(len(layout.entries))]
        slices = [whole.view(layout.world, -1)[comm.rank] for whole in self._buckets]
        return slices, slices

    def _room(self, bucket: Bucket) -> int:
        """Elements to allocate for a bucket."""
        return bucket.numel

    def _reduce_in_place(self, bucket: int, op: str) -> Handle:
        return self._comm.reduce_scatter(self._buckets[bucket], self.sums[bucket], op=op)

    def _view(self, entry: int) -> Tensor:
        bucket, offset = self._homes[entry], self.layout.bucket_offset(entry)
        described = self.layout.entries[entry]
        return self._buckets[bucket][offset : offset + described.numel].view(described.shape)


class ReplicatedGradients(WholeGradients):
    """A whole local gradient per rank that becomes the whole sum on every rank."""

    def fits(self, layout: ShardLayout) -> bool:
        """Whether another packing of the same entries fits into the same memory."""
        return all(
            size <= self.memory[dtype].numel() for dtype, size in numel_by_dtype(layout, lambda b: b.numel).items()
        )

    def _room(self, bucket: Bucket) -> int:
        # Enough for another packing: its entries, and what cutting a bucket into equal slices can add at most.
        return sum(padded(entry.numel) for entry in bucket.entries) + bucket.world * BLOCK

    def _allocate(self, comm: Communicator, layout: ShardLayout) -> tuple[list[Tensor], list[Tensor]]:
        _, slices = super()._allocate(comm, layout)
        return self._buckets, slices

    def _cut(self, bucket: Bucket, slot_numel: int) -> tuple[Piece, ...]:
        return cut_whole(bucket, slot_numel)

    def _reduce(
        self, slot: Tensor, own: Tensor | None, target: Tensor, op: str, first: bool
    ) -> tuple[Handle, Tensor | None]:
        return self._comm.all_reduce(slot, slot, op=op), slot

    def _reduce_in_place(self, bucket: int, op: str) -> Handle:
        whole = self._buckets[bucket]
        return self._comm.all_reduce(whole, whole, op=op)
