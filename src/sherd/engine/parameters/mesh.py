"""Ranks as a mesh: groups of ranks among which parameters are sharded, each with a copy of its own.

    everyone    all ranks. A bucket has as many slices, and each rank updates its own.
    shard       the ranks of this one's group, which have consecutive numbers: together they hold all parameters.
    replicate   the ranks at this one's place in every group. They hold the same.

A rank's *rows* of a bucket are what it holds for its group, one slice from each group's part of the bucket: with groups
of two, rank 1 of four has slices 1 and 3. Groups follow each other in a bucket as their ranks do, so that a group
gathers a bucket part by part, each straight to its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sherd.comm import Communicator, Handle, SoloCommunicator, Together


@dataclass(frozen=True)
class Mesh:
    """The communicators of one rank."""

    everyone: Communicator
    shard: Communicator
    replicate: Communicator

    @classmethod
    def cut(cls, everyone: Communicator, size: int) -> Mesh:
        """Cut all ranks into groups of `size`, which divides their number. Collective."""
        world = everyone.world
        groups = [range(first, first + size) for first in range(0, world, size)]
        columns = [range(place, world, size) for place in range(size)]
        return cls(everyone, _mine(everyone, groups), _mine(everyone, columns))

    def close(self) -> None:
        """Leave the groups that were made for it."""
        for group in (self.shard, self.replicate):
            if group is not self.everyone:
                group.close()

    @property
    def groups(self) -> int:
        """How many copies of the parameters there are."""
        return self.replicate.world

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's rows of a bucket that is whole; strided, one slice each."""
        return whole.view(self.groups, self.shard.world, -1)[:, self.shard.rank]

    def spread(self, slice: Tensor, rows: Tensor) -> Handle:
        """Every group's ranks have updated their slices, of which one is this rank's: bring them into its rows."""
        return self.replicate.all_gather(slice, rows.view(-1))

    def gather(self, rows: Tensor, whole: Tensor, what: str = "") -> Handle:
        """Put this group's rows of a bucket together."""
        parts = zip(rows, whole.view(self.groups, -1), strict=True)
        return Together([self.shard.all_gather(row, part, what=what) for row, part in parts], whole)


def _mine(everyone: Communicator, groups: Sequence[range]) -> Communicator:
    """The communicator among the group that this rank is in."""
    if len(groups) == 1:
        return everyone
    if len(groups) == everyone.world:
        return SoloCommunicator(everyone.options)
    made = [everyone.subgroup(group) for group in groups]
    mine = next(found for found in made if found is not None)
    mine.counters = everyone.counters  # what a rank sends is counted in one place
    return mine
