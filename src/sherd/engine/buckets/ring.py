"""A small ring of slots from which pieces of buckets are reduced, how they are filled, and the reductions in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sherd.comm import Communicator, Handle
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.layout.pieces import Piece

if TYPE_CHECKING:
    from sherd.engine.buckets.bucket import Bucket
    from sherd.engine.buckets.exchange import Exchange

SLOTS = 4
"""How far a rank may run ahead of the slowest. On two ranks that exchange as much as they compute, a backward took
161 ms with two slots, 154 with four and no less with more."""
SLOTS_OF_MANY = 2
"""The same on a host of more than `FEW` ranks, each of which has its slots: on 8 ranks a GPT of 98 M parameters took
30 MB less, at the same speed."""
FEW = 4
READ_IN_PLACE = 3
"""Up to so many ranks, a rank's own part of a piece is read out of its contribution, which lives until the reduction is
done: a whole layer, for the part of one owner. On more ranks that part is copied, and the contribution is free at once.
On 8 ranks a GPT of 98 M parameters took 60 MB less of a host's 3.8 GB, for an eighth more bytes copied into slots."""
MAX_UNDER_WAY = 32
MAX_ON_THE_WAY = 2 * SLOTS
"""The limit for reductions through the ring. Their slots are free again while partial sums still cross the network, in
the communicator's memory."""


class Slot:
    """Memory that pieces are reduced from."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.filled_with: PieceFiller | None = None
        """The piece that was put into it last."""
        self._views: dict[tuple[torch.dtype, int, int], Tensor] = {}

    def view(self, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Elements `[start, stop)`. Pieces share their views, as those of large members are cut alike: else a rank of 8
        kept 2,500 tensors for a GPT of 98 M parameters, 2 MB."""
        place = (dtype, start, stop)
        if (view := self._views.get(place)) is None:
            view = self._views[place] = self.memory[start * dtype.itemsize : stop * dtype.itemsize].view(dtype)
        return view


class Part(NamedTuple):
    """Elements `[start, stop)` of a member, or, without one, padding."""

    member: TrackedParameter | None
    start: int
    stop: int

    def contribution(self) -> Tensor | None:
        """These elements of what autograd computed."""
        if self.member is None or self.member.contribution is None:
            return None
        return self.member.entry.flattened(self.member.contribution)[self.start : self.stop]


class PieceFiller:
    """A piece of a bucket as it is put into a slot, in the dtype that travels, by views that are kept between rounds.

    This rank's own part is not copied if it is a single run: no other rank reads it.
    """

    def __init__(
        self, piece: Piece, members: Mapping[int, TrackedParameter], rank: int, dtype: torch.dtype, wire: torch.dtype
    ) -> None:
        self.start, self.stop = piece.start, piece.stop
        self._numel, self._wire = piece.numel, wire
        self._own: Part | None = None
        self._whole: list[tuple[TrackedParameter, int]] = []  # with their offsets in the slot
        self._cut: list[tuple[Part, int]] = []
        self._gaps: list[tuple[int, int]] = []
        at = 0
        for owner, runs in enumerate(piece.parts):
            for entry, start, stop in runs:
                part = Part(members.get(entry), start, stop)
                if owner == rank and len(runs) == 1 < len(piece.parts) and dtype == wire:
                    self._own = part
                elif part.member is None:
                    self._gaps.append((at, at + stop - start))
                elif stop - start == part.member.entry.numel:
                    self._whole.append((part.member, at))
                else:
                    self._cut.append((part, at))
                at += stop - start
        self._slot: Slot | None = None

    def fill(self, slot: Slot) -> tuple[Tensor, Tensor | None]:
        """Put the contributions into `slot`, zeros where there are none.

        Returns what is to be reduced, and this rank's own part of it if that was not copied.
        """
        if slot is not self._slot:
            self._look_at(slot)
        if slot.filled_with is not self:
            if self._gap_views:
                torch._foreach_zero_(self._gap_views)  # padding is summed, and norms are taken of it
            slot.filled_with = self
        sources = [member.contribution for member, _ in self._whole] + [part.contribution() for part, _ in self._cut]
        views = self._views
        if any(source is None for source in sources):
            torch._foreach_zero_([view for view, source in zip(views, sources, strict=True) if source is None])
            views = [view for view, source in zip(views, sources, strict=True) if source is not None]
        if given := [source for source in sources if source is not None]:
            torch._foreach_copy_(views, given)
        if self._own is None:
            return self._flat, None
        own = self._own.contribution()
        if own is None:
            return self._flat, self._flat.new_zeros(self._own.stop - self._own.start)
        return self._flat, own.to(self._wire)

    def _look_at(self, slot: Slot) -> None:
        """Make views of another slot."""
        self._slot, view = slot, partial(slot.view, self._wire)
        self._flat = flat = view(0, self._numel)
        self._views = [member.entry.shaped(flat[at : at + member.entry.numel]) for member, at in self._whole]
        self._views += [view(at, at + part.stop - part.start) for part, at in self._cut]
        self._gap_views = [view(start, stop) for start, stop in self._gaps]


class Ring:
    """`count` slots of `nbytes` each, used in turn. On a host they are memory from which peers read in place.

    They are allocated by the first `take`, which all ranks make together, since some training never needs them. A slot
    is *lent* to the reduction that reads it, and free when the reduction has released it.
    """

    def __init__(self, comm: Communicator, count: int, nbytes: int, device: torch.device) -> None:
        self._comm = comm
        self.count = count
        self.slot_bytes = nbytes
        self._device = device
        self._slots: list[Slot] = []
        self._lent: list[Handle | None] = [None] * count
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all allocated slots."""
        return sum(slot.memory.numel() for slot in self._slots)

    def take(self, wait_for: Callable[[Handle], None]) -> Slot:
        """The next slot, once the reduction that used it last has read it."""
        if not self._slots:
            self._slots = [Slot(self._allocate()) for _ in range(self.count)]
        reader = self._lent[self._next]
        if reader is not None:
            wait_for(reader)
        return self._slots[self._next]

    def lend(self, handle: Handle) -> None:
        """Lend the slot last taken to `handle` until it is released."""
        self._lent[self._next] = handle
        self._next = (self._next + 1) % self.count

    def done(self, handle: Handle) -> None:
        """A reduction is done: drop its handle, and with it the tensor that it wrote."""
        for slot, reader in enumerate(self._lent):
            if reader is handle:
                self._lent[slot] = None

    def rewind(self) -> None:
        """Nothing is in flight: begin with the first slot again, so that a bucket finds its views of it."""
        self._next = 0

    def _allocate(self) -> Tensor:
        if self._comm.shares_memory and self._device.type == "cpu":
            return self._comm.shared_buffers(self.slot_bytes, dtype=torch.uint8)[self._comm.host.rank]
        return torch.empty(self.slot_bytes, dtype=torch.uint8, device=self._device)


class Reduction(NamedTuple):
    """A reduction in flight. An `addend` is added to `target` at the end; without one, the sum is already there."""

    bucket: Bucket
    handle: Handle
    target: Tensor
    addend: Tensor | None
    last: bool


class Reductions:
    """The reductions of one model that are in flight, oldest first. Each exchange has a ring of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rings: dict[Exchange, Ring] = {}
        self._under_way: deque[Reduction] = deque()
        self.scale = 1.0
        """The loss scale that contributions have, and sums do not."""

    def fit(self, buckets: Iterable[Bucket]) -> None:
        """Make enough slots, large enough for these buckets, which are kept. Nothing may be in flight."""
        sizes: dict[Exchange, tuple[int, int]] = {}
        for bucket in buckets:
            nbytes, pieces = sizes.get(bucket.exchange, (0, 0))
            nbytes = max(nbytes, bucket.exchange.slot_bytes(bucket))
            sizes[bucket.exchange] = nbytes, pieces + bucket.exchange.count(bucket.described)
        for exchange, (nbytes, pieces) in sizes.items():
            comm = exchange.comm
            most = SLOTS_OF_MANY if comm.shares_memory and comm.host.world > FEW else SLOTS
            count = min(pieces, most)  # slots are free when a round ends: it uses no more of them than it has pieces
            ring = self._rings.get(exchange)
            if ring is None or nbytes > ring.slot_bytes or count > ring.count:
                self._rings[exchange] = Ring(comm, count, nbytes, self._device)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(ring.nbytes for ring in self._rings.values())

    def slot(self, exchange: Exchange) -> Slot:
        """A slot to fill and then lend to its reduction."""
        while len(self._under_way) >= MAX_ON_THE_WAY:
            self._finish_oldest()
        return self._rings[exchange].take(self._release)

    def start(
        self, bucket: Bucket, source: Tensor, own: Tensor | None, target: Tensor, op: str, first: bool, last: bool
    ) -> None:
        """Reduce a slot into `target`, or, if that already holds a sum, into what is added to it at the end."""
        exchange = bucket.exchange
        if own is not None and exchange.comm.world > READ_IN_PLACE:
            place = source if bucket.holder is not None else source.view(exchange.comm.world, -1)[exchange.rank]
            place.copy_(own)
            own = None
        into = target
        if exchange.sum_in_slot and source.dtype == target.dtype:
            into = source
        elif exchange.sum_in_slot or not first:
            into = torch.empty_like(target)
        handle = exchange.reduce(bucket, source, into, op, own)
        self._rings[exchange].lend(handle)
        self.add(bucket, handle, target, None if into is target else into, last)

    def add(self, bucket: Bucket, handle: Handle, target: Tensor, addend: Tensor | None, last: bool) -> None:
        """Add a reduction that was started; `last` marks the last one of its bucket."""
        self._under_way.append(Reduction(bucket, handle, target, addend, last))
        self._finish_done()

    def settle(self) -> None:
        """Complete every reduction in flight."""
        while self._under_way:
            self._finish_oldest()
        for ring in self._rings.values():
            ring.rewind()

    def _release(self, handle: Handle) -> None:
        """Wait until the slot of this reduction is free."""
        if any(exchange.sum_in_slot for exchange in self._rings):
            while any(reduction.handle is handle for reduction in self._under_way):
                self._finish_oldest()
        else:
            handle.release()
            self._finish_done()

    def _finish_done(self) -> None:
        # Early, so that sums are used while in the cache and peers do not wait for what this rank can already read.
        while self._under_way and (self._under_way[0].handle.done() or len(self._under_way) > MAX_UNDER_WAY):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        bucket, handle, target, addend, last = self._under_way.popleft()
        handle.wait()
        self._rings[bucket.exchange].done(handle)
        total = target if addend is None else addend
        bucket.divide(total)
        if self.scale != 1.0:
            total.mul_(1.0 / self.scale)
        if addend is not None:
            target.add_(addend)
        if last:
            bucket.finish()
