"""Gradients with room for a whole local one.

Contributions can be added up in it, and are reduced where they lie. What comes after a bucket was reduced goes through
the ring and is added to its sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sherd.comm import Handle
from sherd.engine.gradients.gradients import Reduction, RingGradients
from sherd.engine.gradients.rooms import Room
from sherd.engine.parameters.memory import numel_by_dtype, with_own_storage
from sherd.layout.entry import dtype_of
from sherd.layout.pieces import Piece, cut_whole, largest_whole
from sherd.layout.slicing import Bucket


class WholeGradients(RingGradients):
    """A whole local gradient per rank, reduced into the slice that this rank owns."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.views: list[Tensor] = []
        """By entry: its place in this rank's whole gradient."""
        self._filled: list[bool] = []
        self._homes: list[int] = []
        super().__init__(*args, **options)

    def take(self, entry: int, gradient: Tensor, factor: float) -> None:
        if self.summed[self._homes[entry]]:
            super().take(entry, gradient, factor)
            return
        self.begin(self._homes[entry])
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
        self.begin(bucket)
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

    def _memory_for(self, buckets: Sequence[Bucket]) -> dict[str, Tensor]:
        # Where peers can read it in place, if there is such memory.
        comm, sizes = self._comm, numel_by_dtype(buckets, self._kept)
        if not (comm.shares_memory and self._device.type == "cpu"):
            return self._zeros(sizes)
        return {d: comm.shared_buffers(size, dtype=dtype_of(d))[comm.host.rank] for d, size in sizes.items()}

    def _allocate(self, buckets: Sequence[Bucket], memory: dict[str, Tensor]) -> None:
        super()._allocate(buckets, memory)
        layout, known = self.layout, len(self._filled)
        self._filled += [False] * (len(layout.entries) - known)
        self._homes += [layout.bucket_of(entry).index for entry in range(known, len(layout.entries))]
        views = [self._rooms[self._homes[entry]].current.views[entry] for entry in range(known, len(layout.entries))]
        self.views += views

    def _kept(self, bucket: Bucket) -> int:
        return bucket.numel

    def _room(self, bucket: Bucket, memory: Tensor) -> Room:
        whole = with_own_storage(memory)
        slice = whole.view(self.layout.world, -1)[self._comm.rank]
        views = {}
        for entry in bucket.members:
            offset, described = self.layout.bucket_offset(entry), self.layout.entries[entry]
            views[entry] = described.shaped(whole[offset : offset + described.numel])
        return Room(whole, self._summed(whole, slice), slice, views)

    def _summed(self, whole: Tensor, slice: Tensor) -> Tensor:
        """What is kept of a bucket's sum."""
        return slice

    def _move_into(self, bucket: int, room: Room) -> None:
        super()._move_into(bucket, room)
        for entry, view in room.views.items():
            self.views[entry] = view

    def _reduce_in_place(self, bucket: int, op: str) -> Handle:
        return self._comm.reduce_scatter(self._rooms[bucket].current.whole, self.sums[bucket], op=op)


class ReplicatedGradients(WholeGradients):
    """A whole local gradient per rank that becomes the whole sum on every rank."""

    def _summed(self, whole: Tensor, slice: Tensor) -> Tensor:
        return whole

    def _cut(self, bucket: Bucket) -> tuple[Piece, ...]:
        return cut_whole(bucket, self._slot_numel)

    def _largest(self, bucket: Bucket) -> int:
        return largest_whole(bucket, self._slot_numel)

    def _reduce(
        self, slot: Tensor, own: Tensor | None, target: Tensor, op: str, first: bool
    ) -> tuple[Handle, Tensor | None]:
        return self._comm.all_reduce(slot, slot, op=op), slot

    def _release(self, handle: Handle) -> None:
        """The sum itself is in the slot, until it was added."""
        while any(reduction.handle is handle for reduction in self._under_way):
            self._complete_oldest()

    def _reduce_in_place(self, bucket: int, op: str) -> Handle:
        whole = self.sums[bucket]
        return self._comm.all_reduce(whole, whole, op=op)
