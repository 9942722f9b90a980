"""A bucket: parameters that are exchanged together, and their shared state.

values        their values: the whole bucket, and what this rank owns of it (set by the store)
contribution  a gradient that autograd computed on this rank
local         contributions that have not been sent to any other rank yet
sum           the result of the reduction over the ranks; each owner keeps a slice of it, or every rank keeps all of it
norms         norms of the blocks of this rank's slice of the sum, taken while it is in the cache
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from sherd.comm import Communicator
from sherd.engine.buckets.exchange import Exchange, Rooms
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.errors import SherdError
from sherd.layout import slicing
from sherd.layout.entry import dtype_of
from sherd.layout.pieces import PADDING, Piece
from sherd.layout.placement import BLOCK
from sherd.layout.slicing import FlatBucket, Segment

if TYPE_CHECKING:
    from sherd.engine.buckets.ring import Reductions


class Local(enum.Enum):
    """Contributions of this rank that have not been sent to any other rank."""

    NONE = "none"
    PARTIAL = "of some members"
    COMPLETE = "of every member in this round"


class Sum(enum.Enum):
    """The result of the reduction over the ranks."""

    NONE = "none"
    REDUCING = "being reduced"
    DONE = "reduced"


_SUM_MOVES = {
    Sum.NONE: (Sum.REDUCING, Sum.DONE),  # straight to DONE: the user's program set the gradient itself
    Sum.REDUCING: (Sum.DONE,),
    Sum.DONE: (Sum.REDUCING, Sum.NONE),
}


@dataclass
class Values:
    """Where the values of a bucket's parameters live."""

    whole: Tensor
    owned: Tensor
    """the part that this rank updates"""


class Bucket:
    """Parameters that are exchanged together."""

    comm: Communicator
    """The ranks that hold these parameters."""
    values: Values
    owned_sum: Tensor
    """What an update reads of the sum: as long as `values.owned`, or up to the last element of the last member."""
    norms: Tensor
    """Norms of the blocks of `slice`; a view into the table of all buckets."""
    optimizer: Optimizer | None = None
    """The optimizer whose parameters these are. One in no group of any belongs to the first."""

    def __init__(self, described: slicing.Bucket, members: Sequence[TrackedParameter]) -> None:
        assert isinstance(described, FlatBucket), "parameters are placed flat"
        self.described = described
        self.members = tuple(members)
        self.dtype = dtype_of(described.dtype)
        self._by_entry = dict(zip(described.members, self.members, strict=True))
        for position, member in enumerate(self.members):
            member.bucket, member.position, member.offset = self, position, described.begins[position]
        self.local = Local.NONE
        self.sum_state = Sum.NONE
        self.missing = 0
        """Number of members that have not arrived in the current round."""
        self.launched = False
        """Whether it was launched in the current round."""
        self.scaled = 1.0
        """The factor by which the sum was multiplied since its norms were taken."""
        self.edited = False
        """Whether the sum was changed through `p.grad` and not measured since."""
        self.shown = False
        """Whether its members' `p.grad` show the sum."""
        self.kept = False
        """Whether there is memory for its sum."""
        self._begun = False  # whether memory was chosen for the current gradient
        self._pieces: list[tuple[Piece, list[list[tuple[TrackedParameter | None, int, int]]]]] = []

    def __repr__(self) -> str:
        return f"the bucket of {self.members[0].name!r}, {len(self.members)} parameters"

    def segments(self, owner: int | None) -> Iterator[tuple[TrackedParameter, Segment]]:
        """The part of the bucket that `owner` has, member by member; None has all of it."""
        described = self.described if owner is not None else replace(self.described, world=1)
        return ((self._by_entry[segment.entry], segment) for segment in described.segments(owner or 0))

    # ---------------------------------------------------------------- how its sum is kept

    def keep(self, exchange: Exchange, memory: Tensor) -> None:
        """Train this bucket from now on: keep its sum in `memory` and reduce it by `exchange`."""
        self.exchange = exchange
        self.kept = True
        self._rooms = Rooms(exchange.room(self, memory), lambda: exchange.another_room(self))
        self._move_in()

    @property
    def summed(self) -> bool:
        """Whether there is a sum, done or still being reduced."""
        return self.sum_state is not Sum.NONE

    def move(self, to: Sum) -> None:
        """Change the state of the sum to `to`."""
        if to not in _SUM_MOVES[self.sum_state]:
            raise SherdError(f"{self!r}: its sum is {self.sum_state.value} and cannot become {to.value}")
        self.sum_state = to

    def begin(self) -> None:
        """Prepare to write the sum: the first time, choose memory that the user's program does not hold."""
        if not self._begun:
            self._begun = True
            if self._rooms.current is not self._rooms.choose():
                self._move_in()

    def separate(self) -> None:
        """Move the sum out of memory that the user's program may hold, so that changing it leaves that copy alone."""
        before = self._rooms.current
        if before is not self._rooms.choose():
            self._rooms.current.whole.copy_(before.whole)
            self._move_in()

    def set_to_zero(self) -> None:
        """Make a sum of zeros, into which a program's own gradient is written."""
        self.begin()
        self.sum.zero_()
        self.move(Sum.DONE)

    def drop(self) -> None:
        """Drop the sum: the next gradient starts a new one."""
        if self.summed:
            self.move(Sum.NONE)
        self._begun = False

    def drop_local(self, member: TrackedParameter) -> None:
        """A program dropped the gradient of a member, with the contributions that were not exchanged yet."""
        member.contribution, member.filled, member.used_here = None, False, False
        if not any(other.filled or other.contribution is not None for other in self.members):
            self.local = Local.NONE

    def abandon(self) -> None:
        """A reduction failed. Its partial result is never used."""
        self.sum_state = Sum.DONE if self.summed else Sum.NONE

    def forget(self) -> None:
        """Drop contributions and sum."""
        self.drop()
        self.local = Local.NONE
        for member in self.members:
            member.forget()

    @property
    def whole(self) -> Tensor:
        """All memory kept for the sum: this rank's whole gradient, where the exchange keeps one."""
        return self._rooms.current.whole

    @property
    def more_bytes(self) -> int:
        """Bytes that were allocated because the user's program keeps gradients."""
        return self._rooms.more_bytes if self.kept else 0

    def _move_in(self) -> None:
        room = self._rooms.current
        self.sum, self.slice, self.owned_sum = room.sum, room.slice, room.sum
        for member, view in zip(self.members, room.views, strict=False):
            member.local = view

    # ---------------------------------------------------------------- contributions

    def open(self) -> None:
        """A round begins."""
        self.missing, self.launched = len(self.members), False
        if self.local is Local.COMPLETE:
            self.local = Local.PARTIAL
        for member in self.members:
            member.arrived = False

    def arrive(self, member: TrackedParameter, gradient: Tensor, factor: float) -> bool:
        """Take a contribution; return whether it was the last one missing."""
        self.take(member, gradient, factor)
        if member.arrived:
            return False
        member.arrived = True
        self.missing -= 1
        if self.missing:
            return False
        self.local = Local.COMPLETE
        return True

    def take(self, member: TrackedParameter, gradient: Tensor, factor: float) -> None:
        """Keep a contribution until the bucket is launched."""
        if self.local is Local.NONE:
            self.local = Local.PARTIAL
        if member.local is None or self.summed:
            self._hold(member, gradient, factor)
            return
        self.begin()
        view = member.local
        if member.filled:
            view.add_(gradient, alpha=factor)
        elif factor != 1.0:
            torch.mul(gradient, factor, out=view)
        else:
            view.copy_(gradient)
        member.filled = True

    def _hold(self, member: TrackedParameter, gradient: Tensor, factor: float) -> None:
        gradient = gradient.reshape(-1) if member.entry.order is None else member.entry.flattened(gradient)
        if member.contribution is not None:
            gradient = torch.add(member.contribution, gradient, alpha=factor)  # one rounding, as `add_` into a view
        elif factor != 1.0:
            gradient = gradient * factor
        member.contribution = gradient

    # ---------------------------------------------------------------- reduction

    def launch(self, op: str, reductions: Reductions) -> None:
        """Start reducing the contributions; a missing one counts as zero."""
        self.begin()
        if self.members[0].local is None or self.summed:
            self._launch_through_ring(op, reductions)
        else:
            for member in self.members:
                if not member.filled:
                    member.local.zero_()  # type: ignore[union-attr]
                member.filled = False
            self.move(Sum.REDUCING)
            reductions.add(self, self.exchange.reduce_in_place(self, op), self.sum, None, last=True)
        self.local = Local.NONE

    def _launch_through_ring(self, op: str, reductions: Reductions) -> None:
        first = not self.summed
        self.move(Sum.REDUCING)
        if not self._pieces:  # cut at the first launch: a large world has many
            self._pieces = [(piece, self._runs(piece)) for piece in self.exchange.pieces(self.described)]
        for piece, runs in self._pieces:
            slot = reductions.slot(piece.numel, self.dtype)
            own = self._fill(slot, runs)
            target = self.sum[piece.start : piece.stop]
            handle, addend = self.exchange.reduce(self, slot, own, target, op, first)
            reductions.ring.lend(handle)
            reductions.add(self, handle, target, addend, last=piece is self._pieces[-1][0])
        for member in self.members:
            member.contribution = None
        if not self._pieces:  # no member has any elements
            self.move(Sum.DONE)

    def _runs(self, piece: Piece) -> list[list[tuple[TrackedParameter | None, int, int]]]:
        """The parts of a piece as runs: elements of a member, or padding."""
        return [
            [(None if entry == PADDING else self._by_entry[entry], start, stop) for entry, start, stop in part]
            for part in piece.parts
        ]

    def _fill(self, slot: Tensor, parts: Sequence[Sequence[tuple[TrackedParameter | None, int, int]]]) -> Tensor | None:
        """Copy a piece into its slot, except this rank's own part if that can be read in place."""
        rank, size = self.exchange.rank, slot.numel() // len(parts)
        runs = [_run(slot, *run) for part in parts for run in part]
        if len(parts) == 1 or len(parts[rank]) > 1:
            torch.cat(runs, out=slot)
            return None
        before = sum(len(part) for part in parts[:rank])
        if rank > 0:
            torch.cat(runs[:before], out=slot[: rank * size])
        if rank + 1 < len(parts):
            torch.cat(runs[before + 1 :], out=slot[(rank + 1) * size :])
        return runs[before]

    def finish(self) -> None:
        """The reduction is done."""
        self.move(Sum.DONE)
        self.owned_sum = self.sum
        self.measure()

    def measure(self) -> None:
        """Take the norms of this rank's slice, whose padding is zero. Of a sum that a program dropped they are zero."""
        # In fp32: fp64 takes 20 times as long, and the error over 256 elements is far below that of a 16-bit gradient.
        wide = torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else None
        rows = self.slice.view(self.norms.numel(), BLOCK)
        if self.summed:
            self.norms.copy_(torch.linalg.vector_norm(rows, dim=1, dtype=wide))
        else:
            self.norms.zero_()
        self.scaled, self.edited = 1.0, False

    def scale(self, factor: float) -> None:
        """Multiply the sum by `factor`."""
        self.sum.mul_(factor)
        self.scaled *= factor


def _run(slot: Tensor, member: TrackedParameter | None, start: int, stop: int) -> Tensor:
    held = None if member is None else member.contribution
    if held is None:
        return slot.new_zeros(1).expand(stop - start)
    return held if stop - start == held.numel() else held[start:stop]
