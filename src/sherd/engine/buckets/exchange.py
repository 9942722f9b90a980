"""What a rank keeps of a bucket's sum, and how the ranks reduce into it.

SliceExchange    the slice that this rank owns. Contributions are held as autograd made them until their bucket is
                 complete, then copied into a slot of the ring and reduced from there.
WholeExchange    the same slice, and room for a whole local gradient around it: contributions can be added up in it,
                 and are reduced where they lie. What comes after that goes through the ring.
ReplicaExchange  a whole local gradient that becomes the whole sum on every rank
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from sherd.comm import Communicator, Handle
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.memory import carve, numel_by_dtype, with_own_storage
from sherd.engine.buckets.rooms import Room
from sherd.layout import slicing
from sherd.layout.entry import ITEMSIZE, dtype_of
from sherd.layout.pieces import Piece, cut_by_slice, cut_whole, largest_by_slice, largest_whole


class Exchange(ABC):
    """How sums are kept and reduced, of all buckets alike."""

    sum_in_slot = False
    """Whether what is added to a sum lies in the slot that it was reduced from."""

    def __init__(self, comm: Communicator, slot_numel: int, device: torch.device) -> None:
        self._comm = comm
        self.rank = comm.rank
        self._slot_numel = slot_numel
        self._device = device
        self.nbytes = 0
        """What was allocated for sums, but for what is there because a program keeps gradients."""

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Keep the sums of these buckets, too."""
        described = [bucket.described for bucket in buckets]
        memory = self._allocate(numel_by_dtype(described, self.kept))
        self.nbytes += sum(flat.nbytes for flat in memory.values())
        for bucket, part in zip(buckets, carve(memory, described, self.kept), strict=True):
            bucket.keep(self, part)

    def slot_bytes(self, bucket: Bucket) -> int:
        """Bytes of the largest piece of a bucket."""
        return self.largest(bucket.described) * ITEMSIZE[bucket.described.dtype]

    def another_room(self, bucket: Bucket) -> Room:
        """Memory of this rank's own, for a bucket whose memory a program keeps."""
        numel, dtype = self.kept(bucket.described), bucket.dtype
        return self.room(bucket, torch.zeros(numel, dtype=dtype, device=self._device))

    def _allocate(self, sizes: dict[str, int]) -> dict[str, Tensor]:
        return {d: torch.zeros(size, dtype=dtype_of(d), device=self._device) for d, size in sizes.items()}

    @abstractmethod
    def kept(self, described: slicing.Bucket) -> int:
        """Elements that are kept of a bucket."""

    @abstractmethod
    def room(self, bucket: Bucket, memory: Tensor) -> Room:
        """This memory as a room for a bucket."""

    def reduce_in_place(self, bucket: Bucket, op: str) -> Handle:
        """Reduce this rank's whole gradient, where there is one, into the sum."""
        return self._comm.reduce_scatter(bucket.whole, bucket.sum, op=op)

    def reduce(
        self, slot: Tensor, own: Tensor | None, target: Tensor, op: str, first: bool
    ) -> tuple[Handle, Tensor | None]:
        """Reduce a slot into `target`, or, if that holds a sum already, aside: what is to be added to it."""
        if first:
            return self._comm.reduce_scatter(slot, target, op=op, own=own), None
        aside = torch.empty_like(target)
        return self._comm.reduce_scatter(slot, aside, op=op, own=own), aside

    def pieces(self, described: slicing.Bucket) -> tuple[Piece, ...]:
        """How a bucket goes through the ring."""
        return cut_by_slice(described, self._slot_numel)

    def largest(self, described: slicing.Bucket) -> int:
        """Elements of the largest of these pieces."""
        return largest_by_slice(described, self._slot_numel)


class SliceExchange(Exchange):
    """Sums of slices, reduced through the ring."""

    def kept(self, described: slicing.Bucket) -> int:
        return described.slice_numel

    def room(self, bucket: Bucket, memory: Tensor) -> Room:
        whole = with_own_storage(memory)
        return Room(whole, whole, whole)


class WholeExchange(Exchange):
    """A whole local gradient per rank, reduced into the slice that this rank owns."""

    def kept(self, described: slicing.Bucket) -> int:
        return described.numel

    def room(self, bucket: Bucket, memory: Tensor) -> Room:
        whole = with_own_storage(memory)
        slice = whole.view(self._comm.world, -1)[self.rank]
        views = [member.shaped_in(whole) for member in bucket.members]
        return Room(whole, self._sum(whole, slice), slice, views)

    def _sum(self, whole: Tensor, slice: Tensor) -> Tensor:
        """What is kept of a bucket's sum."""
        return slice

    def _allocate(self, sizes: dict[str, int]) -> dict[str, Tensor]:
        # Where peers can read it in place, if there is such memory.
        comm = self._comm
        if not (comm.shares_memory and self._device.type == "cpu"):
            return super()._allocate(sizes)
        return {d: comm.shared_buffers(size, dtype=dtype_of(d))[comm.host.rank] for d, size in sizes.items()}


class ReplicaExchange(WholeExchange):
    """A whole local gradient per rank that becomes the whole sum on every rank."""

    sum_in_slot = True

    def _sum(self, whole: Tensor, slice: Tensor) -> Tensor:
        return whole

    def pieces(self, described: slicing.Bucket) -> tuple[Piece, ...]:
        return cut_whole(described, self._slot_numel)

    def largest(self, described: slicing.Bucket) -> int:
        return largest_whole(described, self._slot_numel)

    def reduce(
        self, slot: Tensor, own: Tensor | None, target: Tensor, op: str, first: bool
    ) -> tuple[Handle, Tensor | None]:
        return self._comm.all_reduce(slot, slot, op=op), slot

    def reduce_in_place(self, bucket: Bucket, op: str) -> Handle:
        return self._comm.all_reduce(bucket.sum, bucket.sum, op=op)
