"""What a rank keeps of a bucket's sum, and how the ranks reduce into it.

SliceExchange    the slice that this rank owns. Contributions are held as autograd produced them until their bucket is
                 complete, then copied into a slot of the ring and reduced from there.
WholeExchange    the same slice, inside memory for a whole local gradient: contributions are added up there and reduced
                 in place. Later ones go through the ring.
ReplicaExchange  a whole local gradient that becomes the whole sum on every rank
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sherd.comm import Communicator, Handle
from sherd.engine.buckets.memory import carve, numel_by_dtype, with_own_storage
from sherd.layout import slicing
from sherd.layout.entry import dtype_of
from sherd.layout.pieces import Piece, cut_by_slice, cut_whole, largest_by_slice, largest_whole
from sherd.layout.placement import slice_size

if TYPE_CHECKING:
    from sherd.engine.buckets.bucket import Bucket

users_of: Callable[[int], int] = torch._C._storage_Use_Count
"""How many tensors hold a storage."""
MAX_HELD = 4
"""Rooms per bucket that may be used again. A program that keeps more than these probably keeps them for long."""


class Reduce(Protocol):
    """Sums `source` over the ranks into `target` (see `ExchangePolicy.reduce`)."""

    def __call__(
        self, bucket: Bucket, source: Tensor, target: Tensor, op: str, own: Tensor | None = None
    ) -> Handle: ...


class Room:
    """Memory for what is kept of a bucket: `whole`, and views of it that are used often.

    `sum` is the target of the reduction, `slice` the part that this rank owns, and `views` the members' views, if there
    are any. The memory has its own storage, whose users torch counts: more than at the start means that it is held.
    """

    def __init__(self, whole: Tensor, sum: Tensor, slice: Tensor, views: Sequence[Tensor] = ()) -> None:
        self.whole = whole
        self.sum = sum
        self.slice = slice
        self.views = views
        self.storage: int = 0 if whole.is_meta else whole.untyped_storage()._cdata
        self.ours = self._users()

    def held(self) -> bool:
        """Whether the user's program holds a view of it."""
        return self._users() > self.ours

    def _users(self) -> int:
        return int(users_of(self.storage)) if self.storage else 0


class Rooms:
    """The rooms of one bucket. `make` allocates another."""

    def __init__(self, first: Room, make: Callable[[], Room]) -> None:
        self.first = first
        self._make = make
        self._more: list[Room] = []
        self.current = first

    def choose(self) -> Room:
        """A room that is not held, for the next gradient; the first if possible, since peers may read it in place."""
        rooms = [self.first, *self._more]
        self.current = next((room for room in rooms if not room.held()), None) or self._make()
        others = [room for room in self._more if room is not self.current and room.held()]
        self._more = others[-MAX_HELD:]
        if self.current is not self.first:
            self._more.append(self.current)
        return self.current

    @property
    def more_bytes(self) -> int:
        """Bytes of all rooms but the first."""
        return sum(room.whole.nbytes for room in self._more)


class Exchange(ABC):
    """How the sums of the buckets of one communicator are kept and reduced."""

    sum_in_slot = False
    """Whether a slot is reduced in place, and then added to the sum."""

    def __init__(self, comm: Communicator, bucket_numel: int, device: torch.device, reduce: Reduce) -> None:
        self.comm = comm
        self.reduce = reduce
        self.rank = comm.rank
        self._slot_numel = comm.world * slice_size(bucket_numel, comm.world)  # a full bucket is one piece
        self._device = device
        self.nbytes = 0
        """Bytes allocated for sums, without those allocated because the user's program keeps gradients."""

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Keep the sums of these buckets too."""
        described = [bucket.described for bucket in buckets]
        memory = self._allocate(numel_by_dtype(described, self.kept, "sum"))
        self.nbytes += sum(flat.nbytes for flat in memory.values())
        for bucket, part in zip(buckets, carve(memory, described, self.kept, "sum"), strict=True):
            bucket.keep(self, part)

    def slot_bytes(self, bucket: Bucket) -> int:
        """Bytes of the largest piece of a bucket."""
        return self.largest(bucket.described) * bucket.wire.itemsize

    def another_room(self, bucket: Bucket) -> Room:
        """Private memory for a bucket whose memory the user's program keeps."""
        numel, dtype = self.kept(bucket.described), bucket.sum_dtype
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
        """Reduce this rank's whole gradient, if the exchange keeps one, into the sum."""
        return self.reduce(bucket, bucket.whole.to(bucket.wire), bucket.sum, op)

    def pieces(self, described: slicing.Bucket) -> tuple[Piece, ...]:
        """The pieces in which a bucket goes through the ring."""
        return cut_by_slice(described, self._slot_numel)

    def largest(self, described: slicing.Bucket) -> int:
        """Elements of the largest of these pieces."""
        return largest_by_slice(described, self._slot_numel)

    def count(self, described: slicing.Bucket) -> int:
        """How many pieces there are."""
        return -(-described.numel // max(self.largest(described), 1))


class SliceExchange(Exchange):
    """Sums of slices, reduced through the ring."""

    def kept(self, described: slicing.Bucket) -> int:
        return described.owned_numel(self.rank)

    def room(self, bucket: Bucket, memory: Tensor) -> Room:
        whole = with_own_storage(memory)
        return Room(whole, whole, whole)


class WholeExchange(Exchange):
    """A whole local gradient per rank, reduced into the slice that this rank owns."""

    def kept(self, described: slicing.Bucket) -> int:
        return described.numel

    def room(self, bucket: Bucket, memory: Tensor) -> Room:
        whole = with_own_storage(memory)
        slice = bucket.part_of(whole)
        views = [member.shaped_in(whole) for member in bucket.members]
        return Room(whole, self._sum(whole, slice), slice, views)

    def _sum(self, whole: Tensor, slice: Tensor) -> Tensor:
        """What is kept of a bucket's sum."""
        return slice

    def _allocate(self, sizes: dict[str, int]) -> dict[str, Tensor]:
        # In shared memory if possible, so that peers can read it in place.
        comm = self.comm
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
