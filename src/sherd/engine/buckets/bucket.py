"""A bucket: parameters that are exchanged together, and their shared state.

values        their values: the whole bucket, and what this rank owns of it (set by the store)
contribution  a gradient that autograd computed on this rank
local         contributions that have not been sent to any other rank yet
wire          the dtype in which contributions travel; each is multiplied by its round's factor in that or a wider one
master        what the optimizer steps where parameters are rounded: as long as what this rank owns
sum           the result of the reduction over the ranks, in its own dtype; each owner keeps a slice of it, or every
              rank keeps all of it
norms         norms of the blocks of this rank's slice of the sum, taken while it is in the cache
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from sherd.comm import Communicator, Handle
from sherd.engine.buckets.exchange import Exchange, Rooms, users_of
from sherd.engine.buckets.ring import PieceFiller
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.errors import SherdError
from sherd.layout import slicing
from sherd.layout.entry import dtype_of
from sherd.layout.norms import norm_dtype
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
    master: Tensor | None = field(default=None, kw_only=True)
    """what the optimizer steps in place of `owned`, which is this, rounded (see `parameters.masters`)"""
    edited: bool = field(default=True, kw_only=True)
    """whether `owned` may be something else than the rounded master: the program may have written into it"""

    @property
    def stepped(self) -> Tensor:
        """What the optimizer steps."""
        return self.owned if self.master is None else self.master


def gather(
    comm: Communicator, described: slicing.Bucket, part: Tensor, whole: Tensor | None = None, what: str = ""
) -> Handle:
    """`Bucket.gather`, for those that must not hold a bucket."""
    if described.holder is None:
        return comm.all_gather(part, whole, what=what)
    if whole is None:
        whole = part.new_empty(described.numel)
    elsewhere = comm.rank == described.holder and part.data_ptr() != whole.data_ptr()
    return comm.broadcast(whole, described.holder, source=part if elsewhere else None, what=what)


class Bucket:
    """Parameters that are exchanged together."""

    comm: Communicator
    """The ranks that hold these parameters."""
    divisor: int | None = None
    """What a mean is to be divided by, if that is not the number of these ranks: the number of those that train
    together."""
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
        self.wire, self.sum_dtype = dtype_of(described.dtypes.wire), dtype_of(described.dtypes.sum)
        self.update_dtype = dtype_of(described.dtypes.update)
        self._norm_dtype = norm_dtype(self.sum_dtype)
        self.grad_dtypes = (self.dtype, self.sum_dtype)
        """What a program may set `p.grad` to."""
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
        self._divides = False
        self._factor = 1.0
        self._pieces: list[PieceFiller] = []
        self._segments: dict[int, tuple[Segment, ...]] = {}  # by position, of those that were asked for

    def __repr__(self) -> str:
        return f"the bucket of {self.members[0].name!r}, {len(self.members)} parameters"

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The ranks that hold these parameters, if not all do."""
        return self.described.ranks

    @property
    def holder(self) -> int | None:
        """The rank of `comm` that owns all of it, if its members are owned whole."""
        return self.described.holder

    def part_of(self, whole: Tensor) -> Tensor:
        """What this rank owns of a tensor that is as long as the bucket."""
        low, high = self.described.span(self.comm.rank)
        return whole[low:high]

    def gather(self, part: Tensor, whole: Tensor | None = None, what: str = "") -> Handle:
        """All of a tensor that is as long as the bucket, from what each rank owns of it. Collective.

        Ranks must gather the same bucket; they compare `what`, where a program decides which one it is.
        """
        return gather(self.comm, self.described, part, whole, what)

    def segments(self, owner: int | None) -> Iterator[tuple[TrackedParameter, Segment]]:
        """The part of the bucket that `owner`, a rank of `comm`, has, member by member; None has all of it."""
        described = self.described
        if owner is None:
            described = replace(described, world=1, holder=None if self.holder is None else 0)
        return ((self._by_entry[segment.entry], segment) for segment in described.segments(owner or 0))

    def segments_of(self, member: TrackedParameter) -> tuple[Segment, ...]:
        """The part of a member that each owner has."""
        found = self._segments.get(member.position)
        if found is None:
            found = self._segments[member.position] = tuple(self.described.segments_of(member.position))
        return found

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
            room = self._rooms.current
            free = room is self._rooms.first and (not room.storage or users_of(room.storage) <= room.ours)
            if not free and room is not self._rooms.choose():
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
        member.contribution, member.held, member.filled, member.used_here = None, None, False, False
        if not any(each.filled or each.contribution is not None or each.held is not None for each in self.members):
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

    def open(self, factor: float = 1.0) -> None:
        """A round begins, in which contributions are multiplied by `factor`."""
        self.missing, self.launched, self._factor = len(self.members), False, factor
        if self.local is Local.COMPLETE:
            self.local = Local.PARTIAL
        for member in self.members:
            member.arrived = False

    def fits(self, member: TrackedParameter, gradient: Tensor) -> bool:
        """Whether a gradient has the dtype and shape of its parameter."""
        return gradient.dtype is self.dtype and gradient.shape == member.entry.shape

    def arrive(self, member: TrackedParameter, gradient: Tensor) -> bool:
        """Keep a contribution as it is until the bucket is launched; return whether it was the last one missing."""
        if member.contribution is not None:
            self.add_up()  # it arrived before in this round
        member.contribution = gradient
        member.used_here = True
        if member.arrived:
            return False
        member.arrived = True
        self.missing -= 1
        self.local = Local.PARTIAL if self.missing else Local.COMPLETE
        return not self.missing

    def add_up(self) -> None:
        """Add the contributions of this round, times its factor, to what came before: each is rounded once."""
        given = [member for member in self.members if member.contribution is not None]
        if not given:
            return
        gradients: list[Tensor] = [member.contribution for member in given]  # type: ignore[misc]
        factor = self._factor
        if factor == 0.0:
            gradients = [*map(torch.zeros_like, gradients)]  # zero times NaN is NaN: the loss of no tokens may be NaN
        if self._whole_is_local:
            self.begin()
            self._add_up_in_place(given, gradients, factor)
        else:
            for member, gradient in zip(given, gradients, strict=True):
                member.held = self._added(member.held, gradient, factor)
        for member in given:
            member.contribution = None

    def _add_up_in_place(self, given: Sequence[TrackedParameter], gradients: Sequence[Tensor], factor: float) -> None:
        pairs = list(zip(given, gradients, strict=True))
        new = [(member.local, gradient) for member, gradient in pairs if not member.filled]
        if new:
            views, sources = zip(*new, strict=True)
            # Copying converts them to the dtype of the sum, and a factor is multiplied in that.
            torch._foreach_copy_(
                views, sources if factor == 1.0 else [self._added(None, each, factor) for each in sources]
            )
        if more := [(member.local, gradient) for member, gradient in pairs if member.filled]:
            views, sources = zip(*more, strict=True)
            torch._foreach_add_(views, sources, alpha=factor)
        for member in given:
            member.filled = True

    def _added(self, held: Tensor | None, gradient: Tensor, factor: float) -> Tensor:
        if held is not None:
            return torch.add(held, gradient, alpha=factor)
        gradient = gradient.to(self.sum_dtype)
        return gradient if factor == 1.0 else gradient * factor

    @property
    def _whole_is_local(self) -> bool:
        """Whether this rank has memory for the whole gradient, and no sum in it: contributions are added up there."""
        return not self.summed and self.members[0].local is not None

    # ---------------------------------------------------------------- reduction

    def launch(self, op: str, reductions: Reductions) -> None:
        """Start reducing the contributions; a missing one counts as zero."""
        self.begin()
        self._divides = op == "mean" and self.divisor is not None
        if self._divides:
            op = "sum"
        if self._whole_is_local:
            self._launch_in_place(op, reductions)
        else:
            self._launch_through_ring(op, reductions)
        self.local = Local.NONE

    def _launch_in_place(self, op: str, reductions: Reductions) -> None:
        self.add_up()
        for member in self.members:
            if not member.filled:
                member.local.zero_()  # type: ignore[union-attr]
            member.filled = False
        self.move(Sum.REDUCING)
        reductions.add(self, self.exchange.reduce_in_place(self, op), self.sum, None, last=True)

    def _launch_through_ring(self, op: str, reductions: Reductions) -> None:
        first = not self.summed
        self.move(Sum.REDUCING)
        if self._factor != 1.0 or any(member.held is not None for member in self.members):
            self.add_up()  # one by one: in bf16 the same number may round differently in the middle of a longer tensor
            for member in self.members:
                member.contribution, member.held = member.held, None
        if not self._pieces:  # cut at the first launch: a large world has many
            cut = self.exchange.pieces(self.described)
            self._pieces = [
                PieceFiller(piece, self._by_entry, self.exchange.rank, self.dtype, self.wire) for piece in cut
            ]
        for piece in self._pieces:
            source, own = piece.fill(reductions.slot(self.exchange))
            target = self.sum[piece.start : piece.stop]
            reductions.start(self, source, own, target, op, first, last=piece is self._pieces[-1])
        for member in self.members:
            member.contribution = None
        if not self._pieces:  # no member has any elements
            self.move(Sum.DONE)

    def divide(self, total: Tensor) -> None:
        """Make a sum that was just reduced a mean, if the communicator has not."""
        if self._divides:
            total.div_(self.divisor)  # type: ignore[arg-type]

    def finish(self) -> None:
        """The reduction is done."""
        self.move(Sum.DONE)
        self.owned_sum = self.sum
        self.measure()

    def measure(self) -> None:
        """Take the norms of this rank's slice, whose padding is zero. Of a sum that a program dropped they are zero."""
        if self.summed:
            rows = self.slice.view(self.norms.numel(), BLOCK)
            self.norms.copy_(torch.linalg.vector_norm(rows, dim=1, dtype=self._norm_dtype))
        else:
            self.norms.zero_()
        self.scaled, self.edited = 1.0, False

    def not_finite(self) -> list[str]:
        """The names of the members whose norms are not, as far as this rank's slice goes."""
        fine = self.norms.isfinite()
        firsts = [(member, at.offset // BLOCK, at.blocks) for member, at in self.segments(self.comm.rank)]
        return [member.name for member, first, blocks in firsts if not fine[first : first + blocks].all()]

    def scale(self, factor: float) -> None:
        """Multiply the sum by `factor`."""
        self.sum.mul_(factor)
        self.scaled *= factor
