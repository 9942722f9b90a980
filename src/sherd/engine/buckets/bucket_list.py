"""Which buckets are trained, and in what order they are launched.

All parameters are packed when the model is distributed: those that require a gradient together, each of the others in a
bucket of its own. A frozen parameter has no gradient and no optimizer state; when it is unfrozen, its bucket is
appended. A list is immutable: a change makes a new list of the same bucket objects.

A bucket belongs to one optimizer. With several of them, a parameter that is in no group has a bucket of its own too:
any of them may be given it later.

A bucket belongs to one group of ranks too. A list has the buckets that this rank holds. Its layout has those of all
ranks: what ranks tell each other about buckets and parameters is in the order of the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.optim import Optimizer

from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.catalogue import Listed, listed
from sherd.engine.buckets.groups import Ranks
from sherd.engine.buckets.norms import NormTable
from sherd.engine.buckets.tracked import Mode, TrackedParameter
from sherd.layout.packing import Holders
from sherd.layout.shard_layout import ShardLayout


@dataclass(frozen=True)
class BucketList:
    """The buckets that are trained and that this rank holds, in the order of their memory."""

    buckets: tuple[Bucket, ...]
    parameters: tuple[TrackedParameter, ...]
    """in the order of the layout's entries"""
    launch_order: tuple[Bucket, ...]
    """the same on all ranks, as far as they hold the same"""
    layout: ShardLayout
    """of all parameters that are trained on any rank"""
    frozen: tuple[Bucket, ...]
    """one parameter each"""
    table: NormTable
    """the norms of the sums"""
    catalogue: tuple[Listed, ...]
    """the parameters of the layout"""
    asleep: tuple[Listed, ...]
    """the frozen parameters of all ranks"""

    @classmethod
    def pack(
        cls,
        members: Sequence[TrackedParameter],
        world: int,
        group: int,
        bucket_numel: int,
        optimizers: Sequence[Optimizer] = (),
        catalogue: Sequence[Listed] | None = None,
        rank: int = 0,
    ) -> BucketList:
        """Buckets of `bucket_numel` elements for `world` ranks, which sum in groups of `group`; this one is `rank`.

        Inside a bucket, members are ordered by the optimizer's groups, and those in none come last: it steps adjacent
        ones together. `catalogue` has the parameters of all ranks, where they do not all hold the same.
        """
        every = listed(members, optimizers) if catalogue is None else catalogue
        holders = Holders(world)
        trained = _held(holders, [each for each in every if each.trained])
        frozen = _held(holders, [each for each in every if not each.trained])
        keys: list[object] = [None] * len(trained)
        if len(optimizers) > 1:
            keys = [each.entry.name if each.optimizer is None else each.optimizer for each in trained]
        layout = ShardLayout.build(
            (each.entry for each in trained),
            world,
            bucket_numel=bucket_numel,
            group=group,
            order=range(len(trained) - 1, -1, -1),  # in which gradients arrive
            keys=keys,
            ranks=[each.ranks for each in trained],
            holders=[each.holder for each in trained],
        ).sorted_by([each.place for each in trained])
        whole = _grown(layout, frozen)
        found = [*trained, *frozen]
        held: list[Bucket] = []
        for described in whole.buckets:
            its = [member for entry in described.members if (member := found[entry].member) is not None]
            if its:
                held.append(Bucket(described, its))
        assign(held, optimizers)
        parameters = tuple(each.member for each in trained if each.member is not None)
        for member in parameters:
            member.mode = Mode.TRAINED
        buckets = tuple(bucket for bucket in held if bucket.described.index < len(layout.buckets))
        table = NormTable(buckets, layout, rank)
        return cls(buckets, parameters, buckets, layout, tuple(held[len(buckets) :]), table, trained, frozen)

    def unfrozen(self, members: Iterable[TrackedParameter], elsewhere: Iterable[str] = ()) -> BucketList:
        """The list in which these parameters are trained too; `elsewhere` names those that this rank does not hold."""
        names = {*elsewhere, *(member.name for member in members)}
        awake = [each for each in self.asleep if each.entry.name in names]
        members = tuple(each.member for each in awake if each.member is not None)
        joining = tuple(member.bucket for member in members)
        for member in members:
            member.mode = Mode.TRAINED
        layout = _grown(self.layout, awake)
        buckets = self.buckets + joining
        return BucketList(
            buckets,
            self.parameters + members,
            self.launch_order + joining,
            layout,
            tuple(bucket for bucket in self.frozen if bucket not in joining),
            NormTable(buckets, layout, self.table.rank),
            (*self.catalogue, *awake),
            tuple(each for each in self.asleep if each not in awake),
        )

    def launched_in(self, order: Iterable[int]) -> BucketList:
        """The list with another launch order, given as indices into the layout's buckets."""
        chosen = (self.slots[place] for place in order)
        return replace(self, launch_order=tuple(bucket for bucket in chosen if bucket is not None))

    @cached_property
    def grouped(self) -> bool:
        """Whether there are parameters that not all ranks hold."""
        return any(each.ranks is not None for each in (*self.catalogue, *self.asleep))

    @cached_property
    def groups(self) -> tuple[Ranks, ...]:
        """The groups of ranks that hold parameters, on all ranks; None is everyone."""
        found = {each.ranks for each in (*self.catalogue, *self.asleep) if each.ranks is not None}
        return (None, *sorted(found))

    @cached_property
    def holders(self) -> Tensor:
        """How many ranks hold each parameter of the layout."""
        return torch.tensor([len(each.ranks or range(self.layout.world)) for each in self.catalogue])

    @cached_property
    def partly_held(self) -> frozenset[int]:
        """The ids of the parameters of this rank that not all ranks hold."""
        every = (*self.catalogue, *self.asleep) if self.grouped else ()
        return frozenset(id(each.member.parameter) for each in every if each.member is not None and each.ranks)

    @cached_property
    def slots(self) -> tuple[Bucket | None, ...]:
        """The buckets of the layout; None where this rank does not hold one."""
        if not self.grouped:
            return self.buckets
        first = [self.catalogue[bucket.members[0]].member for bucket in self.layout.buckets]
        return tuple(None if member is None else member.bucket for member in first)

    @cached_property
    def entries(self) -> tuple[TrackedParameter | None, ...]:
        """The parameters of the layout; None where this rank does not hold one."""
        return tuple(each.member for each in self.catalogue) if self.grouped else self.parameters

    def of(self, optimizer: Optimizer | None) -> tuple[Bucket, ...]:
        """The buckets of one optimizer."""
        return tuple(bucket for bucket in self.buckets if bucket.optimizer is optimizer)

    @property
    def every(self) -> tuple[Bucket, ...]:
        """The buckets of all parameters."""
        return self.buckets + self.frozen


def _held(holders: Holders, those: Sequence[Listed]) -> tuple[Listed, ...]:
    """The same with the owners of what is owned whole."""
    work, ranks = [each.work for each in those], [each.ranks for each in those]
    chosen = holders.choose([each.entry for each in those], work, ranks)
    return tuple(replace(each, holder=holder) for each, holder in zip(those, chosen, strict=True))


def _grown(layout: ShardLayout, those: Sequence[Listed]) -> ShardLayout:
    """The layout with these at the end, each in its own bucket."""
    ranks, holders = [each.ranks for each in those], [each.holder for each in those]
    return layout.grown((each.entry for each in those), ranks, holders)


def assign(buckets: Iterable[Bucket], optimizers: Sequence[Optimizer]) -> None:
    """Give each bucket to the optimizer that has its parameters; to the first, if none has."""
    having = {id(p): optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for bucket in buckets:
        its = (having[id(member.parameter)] for member in bucket.members if id(member.parameter) in having)
        bucket.optimizer = next(its, optimizers[0] if optimizers else None)
