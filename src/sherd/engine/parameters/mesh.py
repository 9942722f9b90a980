"""Ranks as a mesh: groups of ranks, each of which shards one copy of the parameters.

    everyone    all ranks. A bucket has one slice per rank, and each rank updates its own.
    shard       the ranks of this rank's group, numbered consecutively: together they hold all parameters.
    replicate   the ranks at this rank's position in every group: they hold the same rows.

A rank's *rows* of a bucket are what it holds for its group, one slice from each group's part of the bucket: with groups
of two, rank 1 of four has slices 1 and 3. The groups' parts lie in a bucket in rank order, so a group gathers a bucket
part by part, each directly into place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sherd.comm import Communicator, Handle, SoloCommunicator, Together


@dataclass(frozen=True)
class Teams:
    """Ranks in teams: those of a team train together, and teams meet only where a policy says so.

    The ranks of all teams have the same layout, each for its own copy of the parameters.
    """

    everyone: Communicator
    team: Communicator
    """the ranks that train together, with consecutive numbers"""
    across: Communicator
    """the ranks at this rank's place in every team"""

    @classmethod
    def cut(cls, everyone: Communicator, size: int) -> Teams:
        """Divide all ranks into teams of `size`, which must divide their number. Collective."""
        mesh = Mesh.cut(everyone, size)
        first = everyone.rank - everyone.rank % size
        for group, numbers in (
            (mesh.shard, range(first, first + size)),
            (mesh.replicate, range(everyone.rank % size, everyone.world, size)),
        ):
            group.counters = everyone.counters
            group.numbers = [everyone.numbers[rank] for rank in numbers]
        return cls(everyone, mesh.shard, mesh.replicate)

    def close(self) -> None:
        """Close the communicators that were made for the teams."""
        for group in (self.team, self.across):
            if group is not self.everyone:
                group.close()

    @property
    def count(self) -> int:
        """How many teams there are."""
        return self.across.world


@dataclass(frozen=True)
class Mesh:
    """The communicators of one rank."""

    everyone: Communicator
    shard: Communicator
    replicate: Communicator

    @classmethod
    def cut(cls, everyone: Communicator, size: int) -> Mesh:
        """Divide all ranks into groups of `size`, which must divide their number. Collective."""
        world = everyone.world
        groups = [range(first, first + size) for first in range(0, world, size)]
        columns = [range(place, world, size) for place in range(size)]
        return cls(everyone, _mine(everyone, groups), _mine(everyone, columns))

    def close(self) -> None:
        """Close the communicators that were made for the groups."""
        for group in (self.shard, self.replicate):
            if group is not self.everyone:
                group.close()

    @property
    def groups(self) -> int:
        """The number of copies of the parameters."""
        return self.replicate.world

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's rows of a whole bucket: a strided view, one slice per row."""
        return whole.view(self.groups, self.shard.world, -1)[:, self.shard.rank]

    def spread(self, slice: Tensor, rows: Tensor) -> Handle:
        """Copy the slices that this rank and its replicas have updated into its rows."""
        return self.replicate.all_gather(slice, rows.view(-1))

    def gather(self, rows: Tensor, whole: Tensor, what: str = "") -> Handle:
        """Gather the group's rows into a whole bucket."""
        parts = zip(rows, whole.view(self.groups, -1), strict=True)
        return Together([self.shard.all_gather(row, part, what=what) for row, part in parts], whole)


def _mine(everyone: Communicator, groups: Sequence[range]) -> Communicator:
    """The communicator of the group that contains this rank."""
    if len(groups) == 1:
        return everyone
    if len(groups) == everyone.world:
        return SoloCommunicator(everyone.options)
    made = [everyone.subgroup(group) for group in groups]
    mine = next(found for found in made if found is not None)
    mine.counters = everyone.counters  # what a rank sends is counted in one place
    return mine
