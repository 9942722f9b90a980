"""Which buckets are trained, and in what order they are launched.

All parameters are packed when the model is distributed: those that require a gradient together, each of the others in a
bucket of its own. A frozen parameter has no gradient and no optimizer state; when it is unfrozen, its bucket is
appended. A list is immutable: a change makes a new list of the same bucket objects.

A bucket belongs to one optimizer. With several of them, a parameter that is in no group has a bucket of its own too:
any of them may be given it later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch.optim import Optimizer

from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.norms import NormTable
from sherd.engine.buckets.tracked import Mode, TrackedParameter
from sherd.layout.shard_layout import ShardLayout


@dataclass(frozen=True)
class BucketList:
    """The buckets that are trained, in the order of their memory."""

    buckets: tuple[Bucket, ...]
    parameters: tuple[TrackedParameter, ...]
    """in the order of the layout's entries"""
    launch_order: tuple[Bucket, ...]
    """the same on all ranks"""
    layout: ShardLayout
    """of these parameters"""
    frozen: tuple[Bucket, ...]
    """one parameter each"""
    table: NormTable
    """the norms of the sums"""

    @classmethod
    def pack(
        cls,
        members: Sequence[TrackedParameter],
        world: int,
        group: int,
        bucket_numel: int,
        optimizers: Sequence[Optimizer] = (),
    ) -> BucketList:
        """Buckets of `bucket_numel` elements for `world` ranks, which sum in groups of `group`.

        Inside a bucket, members are ordered by the optimizer's groups, and those in none come last: it steps adjacent
        ones together.
        """
        trained = [member for member in members if member.parameter.requires_grad]
        frozen = [member for member in members if not member.parameter.requires_grad]
        last_first = range(len(trained) - 1, -1, -1)  # the order in which gradients arrive
        groups = [(optimizer, each) for optimizer in optimizers for each in optimizer.param_groups]
        among = {id(p): index for index, (_, each) in enumerate(groups) for p in each["params"]}
        places = [among.get(id(member.parameter), len(groups)) for member in trained]
        keys: list[object] = [None] * len(trained)
        if len(optimizers) > 1:
            keys = [groups[at][0] if at < len(groups) else m.name for m, at in zip(trained, places, strict=True)]
        entries = (member.entry for member in trained)
        layout = ShardLayout.build(
            entries, world, bucket_numel=bucket_numel, group=group, order=last_first, keys=keys
        ).sorted_by(places)
        every = layout.grown(member.entry for member in frozen)
        ordered = [*trained, *frozen]
        made = [Bucket(each, [ordered[entry] for entry in each.members]) for each in every.buckets]
        assign(made, optimizers)
        for member in trained:
            member.mode = Mode.TRAINED
        buckets, frozen_buckets = tuple(made[: len(layout.buckets)]), tuple(made[len(layout.buckets) :])
        return cls(buckets, tuple(trained), buckets, layout, frozen_buckets, NormTable(buckets, trained, world))

    def unfrozen(self, members: Iterable[TrackedParameter]) -> BucketList:
        """The list in which these parameters are trained too."""
        members = tuple(members)
        joining = tuple(member.bucket for member in members)
        for member in members:
            member.mode = Mode.TRAINED
        buckets, parameters = self.buckets + joining, self.parameters + members
        return BucketList(
            buckets,
            parameters,
            self.launch_order + joining,
            self.layout.grown(member.entry for member in members),
            tuple(bucket for bucket in self.frozen if bucket not in joining),
            NormTable(buckets, parameters, self.layout.world),
        )

    def launched_in(self, order: Iterable[int]) -> BucketList:
        """The list with another launch order, given as indices into `buckets`."""
        return replace(self, launch_order=tuple(self.buckets[place] for place in order))

    def of(self, optimizer: Optimizer | None) -> tuple[Bucket, ...]:
        """The buckets of one optimizer."""
        return tuple(bucket for bucket in self.buckets if bucket.optimizer is optimizer)

    @property
    def every(self) -> tuple[Bucket, ...]:
        """The buckets of all parameters."""
        return self.buckets + self.frozen


def assign(buckets: Iterable[Bucket], optimizers: Sequence[Optimizer]) -> None:
    """Give each bucket to the optimizer that has its parameters; to the first, if none has."""
    having = {id(p): optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for bucket in buckets:
        its = (having[id(member.parameter)] for member in bucket.members if id(member.parameter) in having)
        bucket.optimizer = next(its, optimizers[0] if optimizers else None)
