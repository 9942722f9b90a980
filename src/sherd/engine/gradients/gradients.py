"""Gradients on their way from autograd to the sums that an optimizer uses.

    contribution  a gradient that autograd made on this rank
    local         contributions of this rank that no other rank has seen yet
    sum           what was reduced over the ranks; its owner keeps a slice of it, or every rank keeps all of it
    slot          a place in the ring, from which a piece of a bucket is reduced

`RingGradients` keeps sums only: contributions are held as autograd made them until their bucket is complete, then
copied into a slot of a small ring and reduced from there. `whole_gradients` has those with room for a local gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sherd.comm import Communicator, Handle
from sherd.engine.gradients.ring import SLOTS, Ring
from sherd.engine.gradients.rooms import Room, Rooms
from sherd.engine.parameters.memory import carve, numel_by_dtype, with_own_storage
from sherd.layout.entry import ITEMSIZE, dtype_of
from sherd.layout.pieces import PADDING, Piece, cut_by_slice, largest_by_slice
from sherd.layout.shard_layout import ShardLayout
from sherd.layout.slicing import Bucket

MAX_UNDER_WAY = 32
MAX_ON_THE_WAY = 2 * SLOTS
"""Of those that went through the ring. Their slots are free while partial sums of them still cross a network, in memory
of the communicator's."""


@dataclass
class Reduction:
    """A reduction under way. `addend` is added to `target` when it is complete; without one it went there straight."""

    bucket: int
    handle: Handle
    target: Tensor
    addend: Tensor | None
    last: bool


class RingGradients:
    """Sums of slices, reduced through a ring. `sums[b]` is what this rank keeps of bucket b; `slices[b]` what it owns.

    `on_sum(b)` is called whenever a reduction into bucket b is complete, while the sum is in the cache.
    """

    def __init__(
        self,
        comm: Communicator,
        layout: ShardLayout,
        *,
        slot_numel: int,
        on_sum: Callable[[int], None],
        device: torch.device,
    ) -> None:
        self._comm = comm
        self._device = device
        self._slot_numel = slot_numel
        self._on_sum = on_sum
        self.summed: list[bool] = []
        self._begun: list[bool] = []  # by bucket: whether its room was chosen for the gradient at hand
        self._rooms: list[Rooms] = []
        self._made_rooms = False  # whether any bucket ever needed more than its first
        self.sums: list[Tensor] = []
        self.slices: list[Tensor] = []
        self._pieces: dict[int, tuple[Piece, ...]] = {}  # cut at the first launch: in a large world they are many
        self._held: dict[int, Tensor] = {}
        self._under_way: deque[Reduction] = deque()
        self._ring = Ring(comm, 0, device)
        self.memory: list[Tensor] = []
        """All that is allocated for what is kept."""
        self.grow(layout)

    def grow(self, layout: ShardLayout) -> None:
        """Make room for the buckets that `layout` has more. Nothing is under way."""
        self.layout = layout
        added = layout.buckets[len(self.sums) :]
        memory = self._memory_for(added)
        self.memory += memory.values()
        self._allocate(added, memory)
        self.summed += [False] * len(added)
        self._begun += [False] * len(added)
        largest = max((self._largest(bucket) * ITEMSIZE[bucket.dtype] for bucket in layout.buckets), default=0)
        if largest > self._ring.slot_bytes:
            self._ring = Ring(self._comm, largest, self._device)

    # ---------------------------------------------------------------- contributions

    def take(self, entry: int, gradient: Tensor, factor: float) -> None:
        """Keep a contribution until its bucket is launched."""
        gradient = self.layout.entries[entry].flattened(gradient)
        held = self._held.get(entry)
        if held is not None:
            gradient = torch.add(held, gradient, alpha=factor)  # the bits of WholeGradients: rounded once
        elif factor != 1.0:
            gradient = gradient * factor
        self._held[entry] = gradient

    def launch(self, bucket: int, op: str) -> None:
        """Start to reduce what was taken of a bucket; what was not counts as zero."""
        self.begin(bucket)
        described = self.layout.buckets[bucket]
        if bucket not in self._pieces:
            self._pieces[bucket] = self._cut(described)
        pieces = self._pieces[bucket]
        for piece in pieces:
            while len(self._under_way) >= MAX_ON_THE_WAY:
                self._complete_oldest()
            slot = self._ring.take(piece.numel, dtype_of(described.dtype), self._release)
            own = self._fill(slot, piece)
            target = self.sums[bucket][piece.start : piece.stop]
            handle, addend = self._reduce(slot, own, target, op, first=not self.summed[bucket])
            self._ring.lend(handle)
            self._start(Reduction(bucket, handle, target, addend, piece is pieces[-1]))
        for member in described.members:
            self._held.pop(member, None)
        self.summed[bucket] = True

    def begin(self, bucket: int) -> None:
        """The sum of a bucket is about to be written: the first time, choose memory that nobody holds."""
        if not self._begun[bucket]:
            self._begun[bucket] = True
            before = self._rooms[bucket].current
            room = self._rooms[bucket].choose()
            if room is not before:
                self._move_into(bucket, room)

    def drop(self, bucket: int) -> None:
        """There is no sum of a bucket any more: the next gradient is the first again."""
        self.summed[bucket] = self._begun[bucket] = False

    def separate(self, bucket: int) -> None:
        """Move the sum of a bucket out of memory that somebody may hold, so that it can be changed without him."""
        before = self._rooms[bucket].current
        room = self._rooms[bucket].choose()
        if room is not before:
            room.whole.copy_(before.whole)
            self._move_into(bucket, room)

    def settle(self) -> None:
        """Complete every reduction that is under way."""
        while self._under_way:
            self._complete_oldest()

    def forget(self) -> None:
        """Drop all contributions and all sums."""
        self._held.clear()
        self.summed = [False] * len(self.summed)
        self._begun = [False] * len(self._begun)

    def local(self, bucket: int) -> bool:
        """Whether this rank has contributions to a bucket that were not launched."""
        return any(member in self._held for member in self.layout.buckets[bucket].members)

    def bytes(self) -> dict[str, int]:
        """What this rank allocated, by kind."""
        more = sum(rooms.more_bytes for rooms in self._rooms) if self._made_rooms else 0
        return {"gradients": sum(flat.nbytes for flat in self.memory) + more, "buckets": self._ring.nbytes}

    # ---------------------------------------------------------------- how sums are kept

    def _memory_for(self, buckets: Sequence[Bucket]) -> dict[str, Tensor]:
        """Zeroed room for what is kept of these buckets, by dtype."""
        return self._zeros(numel_by_dtype(buckets, self._kept))

    def _zeros(self, sizes: dict[str, int]) -> dict[str, Tensor]:
        return {d: torch.zeros(size, dtype=dtype_of(d), device=self._device) for d, size in sizes.items()}

    def _allocate(self, buckets: Sequence[Bucket], memory: dict[str, Tensor]) -> None:
        """Divide `memory` among these buckets."""
        for bucket, part in zip(buckets, carve(memory, buckets, self._kept), strict=True):
            rooms = Rooms(self._room(bucket, part), partial(self._another_room, bucket))
            self._rooms.append(rooms)
            self.sums.append(rooms.current.sum)
            self.slices.append(rooms.current.slice)

    def _kept(self, bucket: Bucket) -> int:
        """Elements that are kept of a bucket."""
        return bucket.slice_numel

    def _room(self, bucket: Bucket, memory: Tensor) -> Room:
        """This memory as a room for a bucket."""
        whole = with_own_storage(memory)
        return Room(whole, whole, whole, {})

    def _another_room(self, bucket: Bucket) -> Room:
        self._made_rooms = True
        kept = torch.zeros(self._kept(bucket), dtype=dtype_of(bucket.dtype), device=self._device)
        return self._room(bucket, kept)

    def _move_into(self, bucket: int, room: Room) -> None:
        """Keep the sum of a bucket in this room from now on."""
        self.sums[bucket], self.slices[bucket] = room.sum, room.slice

    def _cut(self, bucket: Bucket) -> tuple[Piece, ...]:
        return cut_by_slice(bucket, self._slot_numel)

    def _largest(self, bucket: Bucket) -> int:
        return largest_by_slice(bucket, self._slot_numel)

    def _reduce(
        self, slot: Tensor, own: Tensor | None, target: Tensor, op: str, first: bool
    ) -> tuple[Handle, Tensor | None]:
        """Reduce a slot into `target`, or, if that holds a sum already, aside: what is to be added to it."""
        if first:
            return self._comm.reduce_scatter(slot, target, op=op, own=own), None
        aside = torch.empty_like(target)
        return self._comm.reduce_scatter(slot, aside, op=op, own=own), aside

    # ---------------------------------------------------------------- private

    def _fill(self, slot: Tensor, piece: Piece) -> Tensor | None:
        """Copy a piece into its slot, but for this rank's own part if that can be taken from where it is."""
        rank, size = self._comm.rank, piece.numel // len(piece.parts)
        runs = [self._run(slot, *run) for part in piece.parts for run in part]
        if len(piece.parts) == 1 or len(piece.parts[rank]) > 1:
            torch.cat(runs, out=slot)
            return None
        before = sum(len(part) for part in piece.parts[:rank])
        if rank > 0:
            torch.cat(runs[:before], out=slot[: rank * size])
        if rank + 1 < len(piece.parts):
            torch.cat(runs[before + 1 :], out=slot[(rank + 1) * size :])
        return runs[before]

    def _run(self, slot: Tensor, entry: int, start: int, stop: int) -> Tensor:
        held = None if entry == PADDING else self._held.get(entry)
        if held is None:
            return slot.new_zeros(1).expand(stop - start)
        return held if stop - start == held.numel() else held[start:stop]

    def _start(self, reduction: Reduction) -> None:
        self._under_way.append(reduction)
        self._complete_done()

    def _release(self, handle: Handle) -> None:
        """Wait until the slot of this reduction is free."""
        handle.release()
        self._complete_done()

    def _complete_done(self) -> None:
        # Sums are used while they are in the cache, and peers need not wait for what this rank can read already.
        while self._under_way and (self._under_way[0].handle.done() or len(self._under_way) > MAX_UNDER_WAY):
            self._complete_oldest()

    def _complete_oldest(self) -> None:
        reduction = self._under_way.popleft()
        reduction.handle.wait()
        self._ring.done(reduction.handle)
        if reduction.addend is not None:
            reduction.target.add_(reduction.addend)
        if reduction.last:
            self._on_sum(reduction.bucket)
