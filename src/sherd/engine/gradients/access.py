"""What the user sees as `p.grad`, and how changes to it get into the sums.

Where every rank keeps the whole sum, `p.grad` is a view of it (`WholeAccess`). Where a rank keeps slices, it is a
tensor that is gathered when it is used (`ShardedAccess`). What the program wrote into it, as clip_grad_value_ does, is
copied into the slices before the sums are used. Such a read is collective: if only some ranks read, the communicator
raises an error that names them.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sherd.comm import Communicator
from sherd.engine.buckets.bucket import Bucket, Local
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.checksum import checksum
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.gradients.seen import Seen
from sherd.engine.gradients.sharded_gradient import ShardedGradient
from sherd.engine.gradients.sharded_source import ShardedSource
from sherd.engine.parameters.isolation import bypass_torch_function
from sherd.errors import SherdError
from sherd.patches import foreach


class GradAccess(ABC):
    """`p.grad`, which is None for a member that is not `used`."""

    def __init__(self) -> None:
        self.seen = Seen()
        """By group of ranks, a hash below 2**20 of the gradients that were edited: the same on ranks that made the same
        edits."""
        self.assigned: list[TrackedParameter] = []
        """The parameters whose gradient was set to one of the user's tensors; for messages."""

    def follow(self, members: Iterable[TrackedParameter]) -> None:
        """Include these parameters from now on: they are trained."""
        return

    def show(self, buckets: Sequence[Bucket]) -> None:
        """The sums of these are done: set `p.grad`."""
        with bypass_torch_function():
            for bucket in buckets:
                for member in bucket.members:
                    if member.used and member.parameter.dtype == bucket.dtype:  # otherwise it was converted
                        member.parameter.grad = self._view(member)
                bucket.shown = True

    def hide(self, buckets: BucketList, filling: Iterable[Bucket]) -> None:
        """A round begins: take `p.grad` away, or autograd would add to it. Those that are `filling` show none."""
        self.collect(buckets)
        with bypass_torch_function():
            seen = [
                each
                for each in buckets.buckets
                if each.shown or any(m.parameter.grad is not None for m in each.members)
            ]
        self._take_away(seen)

    def forget(self, buckets: Sequence[Bucket]) -> None:
        """Drop the gradient of these."""
        self._take_away(buckets)
        self.assigned = [member for member in self.assigned if member.bucket not in buckets]

    @property
    def is_used(self) -> bool:
        """Whether there may be changes that were noted, and are not collected yet."""
        return False

    def accept(self, buckets: Sequence[Bucket]) -> None:
        """The sums of these were changed, but not by the program."""
        return

    def collect(self, buckets: BucketList) -> None:
        """Apply changes of `p.grad` to the sums, and mark the buckets that changed as `edited`."""
        rewritten: dict[Bucket, dict[TrackedParameter, Tensor | None]] = {}  # what `p.grad` was set to
        with bypass_torch_function():
            set_by_program = self._not_ours(buckets)
        for member, gradient in set_by_program:
            if gradient is None:
                if member.used and member.bucket.shown:
                    member.used = False
                    rewritten.setdefault(member.bucket, {})[member] = None
            elif gradient.dtype in member.bucket.grad_dtypes:
                member.used = True
                self.assigned.append(member)
                rewritten.setdefault(member.bucket, {})[member] = gradient
            elif member.parameter.dtype is member.bucket.dtype:
                # Where the parameter was converted as well, that is refused.
                raise SherdError(
                    f"p.grad of {member.name!r} was set to a gradient of {gradient.dtype}; write "
                    f"p.grad = gradient.to({member.bucket.sum_dtype})"
                )
        # Where the program cannot see them, only the sums themselves were written.
        changed = {bucket for bucket in self._changed(buckets) if bucket.shown}
        for bucket, gradients in rewritten.items():
            self._rewrite(bucket, gradients)
            bucket.edited = True
        for bucket in changed:
            bucket.edited = True
        for bucket in buckets.buckets:
            if bucket.summed and (bucket in rewritten or bucket in changed):
                self._see(bucket, rewritten.get(bucket, {}))

    def suspects(self, buckets: BucketList) -> set[Bucket]:
        """Buckets that may have been changed in a way that `collect` cannot detect."""
        return set()

    def _take_away(self, buckets: Sequence[Bucket]) -> None:
        with bypass_torch_function():
            for bucket in buckets:
                for member in bucket.members:
                    member.parameter.grad = None
                bucket.shown = False

    def _rewrite(self, bucket: Bucket, gradients: Mapping[TrackedParameter, Tensor | None]) -> None:
        """Write what `p.grad` was set to into the sum. A gradient that the program kept from before does not change."""
        for member, gradient in gradients.items():
            if gradient is None:
                bucket.drop_local(member)
        used = [member for member in bucket.members if member.used]
        if not used:
            bucket.drop()  # model.zero_grad(): the next gradient starts a new sum
            return
        if bucket.local is not Local.NONE:
            names = [member.name for member in bucket.members]
            raise SherdError(
                f"p.grad was set before the gradients of backwards in sherd.no_sync were exchanged (one of {names}); "
                f"set it after the backward outside no_sync"
            )
        for member in used:
            member.parameter.grad = None  # otherwise our own reference would look as if the program kept it
        if bucket.summed:
            bucket.separate()
        else:
            bucket.set_to_zero()
        for member, gradient in gradients.items():
            self._put(member, gradient)
        for member in used:
            member.parameter.grad = self._view(member)

    @abstractmethod
    def _view(self, member: TrackedParameter) -> Tensor:
        """The tensor to show as `p.grad`."""

    @abstractmethod
    def _not_ours(self, buckets: BucketList) -> list[tuple[TrackedParameter, Tensor | None]]:
        """The parameters whose `p.grad` is not the tensor that was shown, with what it is."""

    @abstractmethod
    def _changed(self, buckets: BucketList) -> set[Bucket]:
        """Apply in-place changes to the sums; return the buckets that changed."""

    @abstractmethod
    def _put(self, member: TrackedParameter, gradient: Tensor | None) -> None:
        """Write a gradient, or zeros, into the sum."""

    @abstractmethod
    def _see(self, bucket: Bucket, set_to: Mapping[TrackedParameter, Tensor | None]) -> None:
        """Hash what this rank sees of a changed bucket; `set_to` has the new `p.grad` of those that were set."""


def _members(buckets: Iterable[Bucket]) -> Iterator[TrackedParameter]:
    return (member for bucket in buckets for member in bucket.members)


class WholeAccess(GradAccess):
    """`p.grad` is a view of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self._versions: dict[Bucket, int] = {}

    def follow(self, members: Iterable[TrackedParameter]) -> None:
        self._versions.update({member.bucket: member.bucket.sum._version for member in members})

    def show(self, buckets: Sequence[Bucket]) -> None:
        super().show(buckets)
        self.accept(buckets)

    def collect(self, buckets: BucketList) -> None:
        super().collect(buckets)
        self.accept(buckets.buckets)

    def forget(self, buckets: Sequence[Bucket]) -> None:
        super().forget(buckets)
        self.accept(buckets)

    def accept(self, buckets: Sequence[Bucket]) -> None:
        self._versions.update({bucket: bucket.sum._version for bucket in buckets})

    def suspects(self, buckets: BucketList) -> set[Bucket]:
        # `p.grad.data.mul_(2)` writes into the sum without changing a version.
        return {bucket for bucket in buckets.buckets if bucket.summed}

    def _view(self, member: TrackedParameter) -> Tensor:
        return _local(member).detach()  # a new one each time: as long as it is kept, so is the memory

    def _not_ours(self, buckets: BucketList) -> list[tuple[TrackedParameter, Tensor | None]]:
        strided = torch.strided
        return [
            (member, gradient)
            for member in buckets.parameters
            if (gradient := member.parameter.grad) is None
            or gradient.dtype is not member.bucket.sum_dtype
            or gradient.layout is not strided
            or not gradient.is_set_to(member.local)  # type: ignore[arg-type]
        ]

    def _changed(self, buckets: BucketList) -> set[Bucket]:
        return {bucket for bucket in buckets.buckets if bucket.sum._version != self._versions[bucket]}

    def _put(self, member: TrackedParameter, gradient: Tensor | None) -> None:
        if gradient is None:
            _local(member).zero_()
        else:
            _local(member).copy_(gradient)

    def _see(self, bucket: Bucket, set_to: Mapping[TrackedParameter, Tensor | None]) -> None:
        self.seen.note(bucket, checksum(bucket.sum))


def _local(member: TrackedParameter) -> Tensor:
    assert member.local is not None, "every rank has memory for the whole gradient"
    return member.local


def _references(kept: Mapping[Any, object], key: Any) -> int:
    value = kept[key]
    return sys.getrefcount(value)


_UNSHARED = _references({0: object()}, 0)
"""What it counts for an object that only the mapping holds: the interpreter's own references differ by version."""


class ShardedAccess(GradAccess):
    """`p.grad` is gathered from the owners of its slices when it is used (see `sharded_source`)."""

    def __init__(self, comm: Communicator, grouped: bool) -> None:
        super().__init__()
        foreach.install(ShardedGradient)
        self._source = ShardedSource(comm, grouped, self.seen)
        self._views: dict[TrackedParameter, ShardedGradient] = {}

    def hide(self, buckets: BucketList, filling: Iterable[Bucket]) -> None:
        with bypass_torch_function():
            too_early = next((m.name for m in _members(filling) if m.parameter.grad is not None), None)
        if too_early is not None:
            raise SherdError(
                f"p.grad of {too_early!r} was set inside an accumulation window; do it after its last backward"
            )
        super().hide(buckets, filling)

    @property
    def is_used(self) -> bool:
        return bool(self._source.gathered or self._source.scaled)

    def _view(self, member: TrackedParameter) -> Tensor:
        view = self._views.get(member)
        if view is None:
            view = self._views[member] = ShardedGradient(member, self._source)
        return view

    def _not_ours(self, buckets: BucketList) -> list[tuple[TrackedParameter, Tensor | None]]:
        shown = self._views.get
        return [
            (member, gradient)
            for member in buckets.parameters
            if (gradient := member.parameter.grad) is None or gradient is not shown(member)
        ]

    def _take_away(self, buckets: Sequence[Bucket]) -> None:
        super()._take_away(buckets)
        self._let_go(_members(buckets))
        if self.is_used:
            for bucket in buckets:
                self._source.forget(bucket)

    def _rewrite(self, bucket: Bucket, gradients: Mapping[TrackedParameter, Tensor | None]) -> None:
        for member in gradients:
            member.parameter.grad = None
        self._let_go(gradients)
        super()._rewrite(bucket, gradients)
        if not bucket.summed:
            self._source.forget(bucket)

    def _let_go(self, members: Iterable[TrackedParameter]) -> None:
        """Release these gradients. Those that the program keeps retain their values and may be read later."""
        for member in [member for member in members if member in self._views]:
            if _references(self._views, member) > _UNSHARED or self._views[member]._use_count() > 1:  # type: ignore[attr-defined]
                self._views.pop(member).keep(self._source.reader(member))

    def __del__(self) -> None:
        # The model is gone. A program may still hold its gradients.
        for member, view in self._views.items():
            view.keep(self._source.reader(member))

    def _changed(self, buckets: BucketList) -> set[Bucket]:
        return self._source.take_changes() if self.is_used else set()

    def collect(self, buckets: BucketList) -> None:
        super().collect(buckets)
        if self.is_used:
            self._source.clear()

    def _see(self, bucket: Bucket, set_to: Mapping[TrackedParameter, Tensor | None]) -> None:
        self._source.see(bucket)
        for gradient in set_to.values():
            if gradient is not None:
                self.seen.note(bucket, checksum(gradient))

    def _put(self, member: TrackedParameter, gradient: Tensor | None) -> None:
        flat = None if gradient is None else member.entry.flattened(gradient.detach().to_dense())
        for own, start in member.own_parts():
            own.copy_(own.new_zeros(()) if flat is None else flat[start : start + own.numel()])
