"""An outer optimizer: it steps the parameters of all teams from the mean of what the teams have made of them.

    g = anchor - mean over the teams         the outer gradient of so many inner steps
    anchor = anchor - lr * (momentum of g)   the new values, which all teams continue from

The anchor, which is what all teams had after the last exchange, and the momentum are in fp32, or in the dtype of the
parameters where that is wider. A rank has the part of them that it steps: of what it owns in its team, one part per
team.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sherd.comm import Communicator, Handle
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.parameters.mesh import Teams
from sherd.engine.policy import StepContext
from sherd.strategies.crossing import Roll, gather_parts, mean_of_part, spread, together, values_of


@dataclass(frozen=True)
class Outer:
    """SGD as torch has it, and what travels."""

    lr: float
    momentum: float
    nesterov: bool
    wire: torch.dtype | None = None
    """None: values travel as the anchor is kept. Else differences travel, in this dtype, and every team keeps the whole
    anchor: a value itself would lose more by rounding than a few inner steps change it."""

    def direction(self, gradient: Tensor, momentum: Tensor) -> Tensor:
        """Where to go, down; `gradient` is used up."""
        if not self.momentum:
            return gradient
        momentum.mul_(self.momentum).add_(gradient)
        return gradient.add_(momentum, alpha=self.momentum) if self.nesterov else momentum


@dataclass(frozen=True)
class Stretch:
    """Consecutive elements of what this rank exchanges of a bucket."""

    bucket: Bucket
    start: int
    stop: int

    @property
    def values(self) -> Tensor:
        return values_of(self.bucket)[self.start : self.stop]


class Part:
    """Stretches of one dtype that are exchanged together, with their outer state."""

    def __init__(self, stretches: Sequence[Stretch], across: Communicator, outer: Outer) -> None:
        self._stretches, self._across, self._outer = stretches, across, outer
        like = stretches[0].values
        self._wide = torch.promote_types(like.dtype, torch.float32)
        self._cut = -(-sum(each.stop - each.start for each in stretches) // across.world)
        kept = self._cut if outer.wire is None else self._cut * across.world
        self._anchor = like.new_zeros(kept, dtype=self._wide)
        self._momentum = like.new_zeros(self._cut if outer.momentum else 0, dtype=self._wide)
        self._handle: Handle | None = None  # None: it joined, or was restarted, since the exchange began
        self._own = self._anchor.new_empty(0)  # what this team has sent of the part that this rank steps
        self.squared = 0.0
        """How far that was from the mean over the teams."""

    @property
    def nbytes(self) -> int:
        return self._anchor.nbytes + self._momentum.nbytes

    def restart(self) -> None:
        """What all teams have now is the anchor. Whatever is under way is dropped."""
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        values = self._values()
        mine = values.view(self._across.world, -1)[self._across.rank]
        self._anchor.copy_(mine if self._outer.wire is None else values)
        self._momentum.zero_()

    def _values(self) -> Tensor:
        """This team's values, with zeros at the end so that they can be cut."""
        flat = self._anchor.new_zeros(self._cut * self._across.world)
        spread(flat, [each.values for each in self._stretches], lambda view, room: room.copy_(view))
        return flat

    def send_values(self, factor: float | None, aside: bool) -> None:
        """Begin to take the mean over the teams; this one counts by `factor`, or all count the same."""
        flat = self._values()
        if self._outer.wire is not None:
            flat = self._anchor - flat
        self._own = flat.view(self._across.world, -1)[self._across.rank].clone()
        if factor is not None:
            flat.mul_(factor)
        if self._outer.wire is not None:
            flat = flat.to(self._outer.wire)
        target = self._anchor.new_empty(self._cut)
        self._handle = mean_of_part(self._across, flat, "mean" if factor is None else "sum", target, aside)

    def send_new(self, aside: bool) -> None:
        """Step this rank's part of the anchor, and begin to send it to the other teams."""
        if self._handle is None:
            return
        mean, outer = self._handle.wait(), self._outer
        self.squared, self._own = float(torch.dist(self._own, mean)) ** 2, self._own[:0]
        if outer.wire is None:
            self._anchor.add_(outer.direction(self._anchor - mean, self._momentum), alpha=-outer.lr)
            new = self._anchor
        else:
            new = (outer.direction(mean, self._momentum) * outer.lr).to(outer.wire)
        self._handle = gather_parts(self._across, new, aside)

    def merge(self, mix: float) -> None:
        """Continue from the new values, or from `mix` of them and the rest of this team's own."""
        if self._handle is None:
            return
        new, self._handle = self._handle.wait(), None
        if self._outer.wire is not None:
            new = self._anchor.sub_(new)

        def put(view: Tensor, value: Tensor) -> None:
            view.copy_(value if mix == 1.0 else torch.lerp(view.to(value.dtype), value, mix))

        spread(new, [each.values for each in self._stretches], put)


class Fragment:
    """Parameters that are exchanged at the same steps."""

    def __init__(self) -> None:
        self._members: list[TrackedParameter] = []
        self._parts: list[Part] = []
        self.buckets: list[Bucket] = []
        self._seen = 0.0  # how many samples this rank had trained on when teams were counted last
        self._roll: Roll | None = None

    def add(self, members: Sequence[TrackedParameter], whole: bool, across: Communicator, outer: Outer) -> None:
        """Exchange these too, from what they are now; `whole`: they are all members of their buckets."""
        self._members += members
        buckets = list(dict.fromkeys(member.bucket for member in members))
        self.buckets += [bucket for bucket in buckets if bucket not in self.buckets]
        stretches = (each for bucket in buckets for each in _stretches(bucket, set(members), whole))
        for those in together(stretches, lambda each: each.values):
            part = Part(those, across, outer)
            part.restart()
            self._parts.append(part)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    @property
    def squared(self) -> float:
        """The squared distance of what this rank steps from its mean over the teams, in the last exchange."""
        return sum(part.squared for part in self._parts)

    def restart(self, samples: float | None) -> None:
        """All teams have the same values now."""
        if self._roll is not None:
            self._factor()
        for part in self._parts:
            part.restart()
        self._seen = self._seen if samples is None else samples

    def call(self, teams: Teams, s: StepContext, aside: bool) -> None:
        """Ask the other teams how much they count, unless that is done."""
        if self._roll is None:
            names = [member.name for member in self._members]
            self._roll = Roll(teams, s.samples - self._seen, names, s.step, aside)
            self._seen = s.samples

    def _factor(self) -> float | None:
        assert self._roll is not None, "teams were called"
        roll, self._roll = self._roll, None
        return roll.factor()

    def exchange(self) -> None:
        """The whole exchange, in which up to three parts are under way."""
        factor, parts = self._factor(), self._parts
        for number in range(len(parts) + 2):
            if number < len(parts):
                parts[number].send_values(factor, aside=False)
            if 0 < number <= len(parts):
                parts[number - 1].send_new(aside=False)
            if number > 1:
                parts[number - 2].merge(1.0)

    def send_values(self) -> None:
        """The first third of an exchange that takes several steps."""
        factor = self._factor()
        for part in self._parts:
            part.send_values(factor, aside=True)

    def send_new(self) -> None:
        """The second."""
        for part in self._parts:
            part.send_new(aside=True)

    def merge(self, mix: float) -> None:
        """The last."""
        for part in self._parts:
            part.merge(mix)


def _stretches(bucket: Bucket, members: set[TrackedParameter], whole: bool) -> Iterator[Stretch]:
    """What this rank exchanges of these members of a bucket."""
    if whole:
        yield Stretch(bucket, 0, values_of(bucket).numel())
        return
    for member, segment in bucket.segments(bucket.comm.rank):
        if member in members and segment.numel:
            yield Stretch(bucket, segment.offset, segment.offset + segment.numel)


def cut(members: Sequence[TrackedParameter], count: int) -> list[list[TrackedParameter]]:
    """As many rows of parameters, none empty, of about as many elements each."""
    total, taken, rows = sum(member.entry.numel for member in members), 0, []
    waiting = list(members)
    for number in range(count):
        row: list[TrackedParameter] = []
        least = count - number - 1  # one for each row that follows
        while len(waiting) > least and (not row or number == count - 1 or taken * count < total * (number + 1)):
            row.append(waiting.pop(0))
            taken += row[-1].entry.numel
        rows.append(row)
    return rows
