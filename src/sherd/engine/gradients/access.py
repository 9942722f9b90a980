"""What a user sees as `p.grad`, and how what is done to it comes back into the sums.

Where every rank keeps the whole sum, `p.grad` is a view of it (`WholeAccess`). Where a rank keeps slices, it is a
tensor that is gathered when it is used (`ShardedAccess`). What was gathered is written back before the sums are used: a
program may have changed it, as `torch.nn.utils.clip_grad_norm_` does. Reading is collective then: a rank that reads
alone gets an error from the communicator, which names it.
"""

from __future__ import annotations

import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sherd.comm import Communicator, labelled
from sherd.engine.buckets.bucket import Bucket, Local
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.checksum import checksum
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.gradients.sharded_gradient import ShardedGradient
from sherd.engine.parameters.isolation import bypass_torch_function
from sherd.errors import SherdError

ALONE = "Under ZeRO p.grad is gathered from all ranks: read or set it on every rank"


class GradAccess(ABC):
    """`p.grad`. A member that is not `used` has none: `p.grad` is None."""

    def __init__(self) -> None:
        self.seen = 0
        """A hash, below 2**20, of gradients that were edited: ranks that did the same see the same."""
        self.assigned: list[str] = []
        """The parameters whose gradient was set to a tensor of the user's; for messages."""
        self._shown = False

    def follow(self, members: Iterable[TrackedParameter]) -> None:
        """These parameters are trained from now on."""
        return

    def show(self, buckets: BucketList) -> None:
        """The sums are complete and may be seen."""
        with bypass_torch_function():
            for member in buckets.parameters:
                if member.used and member.parameter.dtype == member.bucket.dtype:  # or it was converted
                    member.parameter.grad = self._view(member)
        self._shown = True

    def hide(self, buckets: BucketList, complete: bool) -> None:
        """A round begins: autograd must find no gradient to add to. It is not `complete` inside a window."""
        before = None if self._shown else [bucket.edited for bucket in buckets.buckets]
        self.collect(buckets)
        if before is not None:
            for bucket, edited in zip(buckets.buckets, before, strict=True):
                bucket.edited = edited
        self._take_away(buckets)

    def forget(self, buckets: BucketList) -> None:
        """There is no gradient any more."""
        self._take_away(buckets)
        self.seen, self.assigned = 0, []

    def collect(self, buckets: BucketList) -> None:
        """Bring what was done to `p.grad` into the sums; the buckets that changed are `edited` then."""
        rewritten: dict[Bucket, dict[TrackedParameter, Tensor | None]] = {}  # what `p.grad` was set to
        for member, gradient in _grads(buckets):
            if gradient is None:
                if member.used and self._shown:
                    member.used = False
                    rewritten.setdefault(member.bucket, {})[member] = None
            elif gradient.dtype == member.bucket.dtype and not self._is_ours(member, gradient):
                # Of another dtype: the parameter was converted, which will be refused.
                member.used = True
                self.assigned.append(member.name)
                rewritten.setdefault(member.bucket, {})[member] = gradient
        changed = self._changed(buckets)
        for bucket, gradients in rewritten.items():
            self._rewrite(bucket, gradients)
            bucket.edited = True
        for bucket in changed:
            bucket.edited = True
        for bucket in buckets.buckets:
            if bucket.summed and (bucket in rewritten or bucket in changed):
                self._see(bucket, rewritten.get(bucket, {}))

    def suspects(self, buckets: BucketList) -> set[Bucket]:
        """Buckets that may have been changed in a way that `collect` cannot see."""
        return set()

    def _take_away(self, buckets: BucketList) -> None:
        self._shown = False
        with bypass_torch_function():
            for member in buckets.parameters:
                member.parameter.grad = None

    def _rewrite(self, bucket: Bucket, gradients: Mapping[TrackedParameter, Tensor | None]) -> None:
        """Put into a sum what `p.grad` was set to. Whoever keeps what it was before shall find it so."""
        used = [member for member in bucket.members if member.used]
        if not used:
            bucket.drop()  # model.zero_grad(): the next gradient is the first again
            return
        if bucket.local is not Local.NONE:
            names = [member.name for member in bucket.members]
            raise SherdError(
                f"p.grad was set while gradients of backwards in sherd.no_sync were not exchanged yet (one of {names})"
                f"; set it after the backward outside no_sync"
            )
        for member in used:
            member.parameter.grad = None  # or our own would look as if somebody kept them
        if bucket.summed:
            bucket.separate()
        else:
            bucket.set(zero=True)
        for member, gradient in gradients.items():
            self._put(member, gradient)
        for member in used:
            member.parameter.grad = self._view(member)

    def _note_seen(self, what: object) -> None:
        self.seen = zlib.crc32(f"{self.seen} {what}".encode()) >> 12

    @abstractmethod
    def _view(self, member: TrackedParameter) -> Tensor:
        """What `p.grad` is to be."""

    @abstractmethod
    def _is_ours(self, member: TrackedParameter, gradient: Tensor) -> bool:
        """Whether `p.grad` is what was shown."""

    @abstractmethod
    def _changed(self, buckets: BucketList) -> set[Bucket]:
        """Bring what was changed in place into the sums; the buckets of that."""

    @abstractmethod
    def _put(self, member: TrackedParameter, gradient: Tensor | None) -> None:
        """Write a gradient, or zeros, into the sum."""

    @abstractmethod
    def _see(self, bucket: Bucket, set_to: Mapping[TrackedParameter, Tensor | None]) -> None:
        """Note what this rank sees of a bucket that was changed; `set_to` is what `p.grad` was set to in it."""


def _grads(buckets: BucketList) -> list[tuple[TrackedParameter, Tensor | None]]:
    with bypass_torch_function():
        return [(member, member.parameter.grad) for member in buckets.parameters]


class WholeAccess(GradAccess):
    """`p.grad` is a view of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self._versions: dict[Bucket, int] = {}

    def follow(self, members: Iterable[TrackedParameter]) -> None:
        self._versions.update({member.bucket: member.bucket.sum._version for member in members})

    def show(self, buckets: BucketList) -> None:
        super().show(buckets)
        self._note(buckets)

    def collect(self, buckets: BucketList) -> None:
        super().collect(buckets)
        self._note(buckets)

    def forget(self, buckets: BucketList) -> None:
        super().forget(buckets)
        self._note(buckets)

    def suspects(self, buckets: BucketList) -> set[Bucket]:
        # `p.grad.data.mul_(2)` writes into the sum and leaves no version to go by.
        return {bucket for bucket in buckets.buckets if bucket.summed}

    def _view(self, member: TrackedParameter) -> Tensor:
        return _local(member).detach()  # another one each time: who keeps it holds on to the memory

    def _is_ours(self, member: TrackedParameter, gradient: Tensor) -> bool:
        return gradient.layout is torch.strided and gradient.is_set_to(_local(member))

    def _changed(self, buckets: BucketList) -> set[Bucket]:
        return {bucket for bucket in buckets.buckets if bucket.sum._version != self._versions[bucket]}

    def _put(self, member: TrackedParameter, gradient: Tensor | None) -> None:
        if gradient is None:
            _local(member).zero_()
        else:
            _local(member).copy_(gradient)

    def _see(self, bucket: Bucket, set_to: Mapping[TrackedParameter, Tensor | None]) -> None:
        self._note_seen(checksum(bucket.sum))

    def _note(self, buckets: BucketList) -> None:
        self._versions = {bucket: bucket.sum._version for bucket in buckets.buckets}


def _local(member: TrackedParameter) -> Tensor:
    assert member.local is not None, "every rank has room for the whole gradient"
    return member.local


class ShardedAccess(GradAccess):
    """`p.grad` is gathered from the owners of its slices when it is used."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm
        self._views: dict[TrackedParameter, ShardedGradient] = {}
        self._gathered: dict[Bucket, Tensor] = {}
        self._scaled: set[Bucket] = set()

    def hide(self, buckets: BucketList, complete: bool) -> None:
        for member, gradient in () if complete else _grads(buckets):
            if gradient is not None:
                raise SherdError(
                    f"p.grad of {member.name!r} was set inside an accumulation window; do it after its last backward"
                )
        super().hide(buckets, complete)

    def read(self, member: TrackedParameter) -> Tensor:
        """The whole gradient of a parameter. Collective."""
        bucket = member.bucket
        if bucket not in self._gathered:
            with labelled(f"reading the gradient of {member.name!r}", ALONE):
                self._gathered[bucket] = self._comm.all_gather(bucket.slice).wait()
        return member.shaped_in(self._gathered[bucket])

    def scale(self, member: TrackedParameter, how: str, by: tuple[Any, ...]) -> bool:
        """Scale this rank's part of a gradient, if it was not gathered."""
        if member.bucket in self._gathered or not member.bucket.summed:
            return False
        for own, _ in self._own(member):
            getattr(own, how)(*by)
        self._scaled.add(member.bucket)
        self._note_seen((member.name, how, [float(each) for each in by]))
        return True

    def _view(self, member: TrackedParameter) -> Tensor:
        view = self._views.get(member)
        if view is None:
            view = self._views[member] = ShardedGradient(member, self)
        return view

    def _is_ours(self, member: TrackedParameter, gradient: Tensor) -> bool:
        return gradient is self._views.get(member)

    def _take_away(self, buckets: BucketList) -> None:
        super()._take_away(buckets)
        self._let_go(self._views)
        self._gathered.clear()  # sums may be scaled or zeroed from here on
        self._scaled.clear()

    def _rewrite(self, bucket: Bucket, gradients: Mapping[TrackedParameter, Tensor | None]) -> None:
        for member in gradients:
            member.parameter.grad = None
        self._let_go(gradients)
        super()._rewrite(bucket, gradients)
        if not bucket.summed:
            self._gathered.pop(bucket, None)

    def _let_go(self, members: Iterable[TrackedParameter]) -> None:
        """These gradients are over. Those that a program keeps stay what they are; it may read them later."""
        for member in list(members):
            view = self._views.get(member)
            # Ours are the dict, the name, and what getrefcount itself is given.
            if view is not None and (sys.getrefcount(view) > 3 or view._use_count() > 1):  # type: ignore[attr-defined]
                del self._views[member]
                view.keep(self._reader(member))

    def _reader(self, member: TrackedParameter) -> Any:
        """What reads the gradient of now, later. Holding it keeps its memory from being used for the next one."""
        if member.bucket in self._gathered:
            whole = member.shaped_in(self._gathered[member.bucket])
            return lambda: whole
        part, found = member.bucket.slice.detach(), list[Tensor]()

        def read() -> Tensor:
            if not found:
                with labelled(f"reading a gradient of {member.name!r} that was kept", ALONE):
                    found.append(member.shaped_in(self._comm.all_gather(part).wait()))
            return found[0]

        return read

    def _changed(self, buckets: BucketList) -> set[Bucket]:
        for bucket, whole in self._gathered.items():  # p.grad.data.clamp_() leaves no version to go by
            bucket.slice.copy_(whole.view(self._comm.world, -1)[self._comm.rank])
        return {*self._gathered, *self._scaled}

    def collect(self, buckets: BucketList) -> None:
        super().collect(buckets)
        self._gathered.clear()  # sums may be scaled or zeroed from here on
        self._scaled.clear()

    def _see(self, bucket: Bucket, set_to: Mapping[TrackedParameter, Tensor | None]) -> None:
        whole = self._gathered.get(bucket)
        for member in bucket.members:
            gradient = set_to.get(member)
            if gradient is None and whole is not None and member.used:
                gradient = member.shaped_in(whole)
            if gradient is not None:
                self._note_seen(checksum(gradient))

    def _put(self, member: TrackedParameter, gradient: Tensor | None) -> None:
        flat = None if gradient is None else member.entry.flattened(gradient.detach().to_dense())
        for own, start in self._own(member):
            own.copy_(own.new_zeros(()) if flat is None else flat[start : start + own.numel()])

    def _own(self, member: TrackedParameter) -> Iterable[tuple[Tensor, int]]:
        """This rank's parts of a gradient, and where each begins in it."""
        for segment in member.segments():
            if segment.owner == self._comm.rank:
                yield member.bucket.slice[segment.offset : segment.offset + segment.numel], segment.region.start
