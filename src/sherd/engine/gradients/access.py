"""What a user sees as `p.grad`, and how what is done to it comes back into the sums.

Where every rank keeps the whole sum, `p.grad` is a view of it (`NativeGrads`). Where a rank keeps slices, reading
`p.grad` gathers the bucket that the parameter is in (`GatheredGrads`); a gathered gradient that was changed, as
`torch.nn.utils.clip_grad_norm_` does, is written back before it is used. Reading is collective then: a rank that reads
alone gets an error from the communicator, which names it.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from sherd.comm import Communicator, labelled
from sherd.engine.buckets.bucket import Bucket, Local
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.checksum import checksum
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.errors import SherdError
from sherd.patches.gathered import raw_grad, set_raw_grad, shard_grad

_ALONE = "Under ZeRO p.grad is gathered from all ranks: read or set it on every rank"


class GradAccess(ABC):
    """`p.grad`. A member that is not `used` has none: `p.grad` is None."""

    def __init__(self) -> None:
        self.seen = 0
        """A hash, below 2**20, of gradients that were edited: ranks that did the same see the same."""
        self.assigned: list[str] = []
        """The parameters whose gradient was set to a tensor of the user's; for messages."""

    def follow(self, members: Iterable[TrackedParameter]) -> None:
        """These parameters are trained from now on."""
        return

    @abstractmethod
    def hide(self, buckets: BucketList) -> None:
        """A round begins: autograd must find no gradient to add to."""

    @abstractmethod
    def show(self, buckets: BucketList) -> None:
        """The sums are complete and may be seen."""

    @abstractmethod
    def collect(self, buckets: BucketList) -> None:
        """Bring what was done to `p.grad` into the sums; the buckets that changed are `edited` then."""

    def suspects(self, buckets: BucketList) -> set[Bucket]:
        """Buckets that may have been changed in a way that `collect` cannot see."""
        return set()

    @abstractmethod
    def forget(self, buckets: BucketList) -> None:
        """There is no gradient any more."""

    def _see(self, gradient: Tensor) -> None:
        self.seen = zlib.crc32(f"{self.seen} {checksum(gradient)}".encode()) >> 12


def _refuse_local(bucket: Bucket) -> None:
    """Refuse to write a gradient where some have not been exchanged yet: they lie in the same memory."""
    if bucket.local is not Local.NONE:
        names = [member.name for member in bucket.members]
        raise SherdError(
            f"p.grad was set while gradients of backwards in sherd.no_sync were not exchanged yet (one of {names})"
            f"; set it after the backward outside no_sync"
        )


class NativeGrads(GradAccess):
    """`p.grad` is a view of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self._shown = False
        self._versions: dict[Bucket, int] = {}

    def follow(self, members: Iterable[TrackedParameter]) -> None:
        self._versions.update({member.bucket: member.bucket.sum._version for member in members})

    def hide(self, buckets: BucketList) -> None:
        before = [bucket.edited for bucket in buckets.buckets]
        self.collect(buckets)
        if not self._shown:
            for bucket, edited in zip(buckets.buckets, before, strict=True):
                bucket.edited = edited
        self._shown = False
        for member in buckets.parameters:
            set_raw_grad(member.parameter, None)

    def show(self, buckets: BucketList) -> None:
        for member in buckets.parameters:
            view = member.local
            assert view is not None, "every rank has room for the whole gradient"
            if member.used and member.parameter.dtype == view.dtype:  # or it was converted
                set_raw_grad(member.parameter, view.detach())  # another one each time: who keeps it holds the memory
        self._shown = True
        self._note(buckets)

    def collect(self, buckets: BucketList) -> None:
        rewritten: dict[Bucket, dict[TrackedParameter, Tensor | None]] = {}  # what `p.grad` was set to
        for member in buckets.parameters:
            gradient, view = raw_grad(member.parameter), member.local
            assert view is not None, "every rank has room for the whole gradient"
            if gradient is None:
                if member.used and self._shown:
                    member.used = False
                    rewritten.setdefault(member.bucket, {})[member] = None
            elif gradient.dtype != view.dtype:
                continue  # the parameter was converted, which will be refused
            elif gradient.layout is not torch.strided or not gradient.is_set_to(view):
                member.used = True
                self.assigned.append(member.name)
                rewritten.setdefault(member.bucket, {})[member] = gradient
        changed = [b for b in buckets.buckets if b in rewritten or b.sum._version != self._versions[b]]
        for bucket, gradients in rewritten.items():
            self._rewrite(bucket, gradients)
        for bucket in changed:
            bucket.edited = True
            if bucket.summed:
                self._see(bucket.sum)
        self._note(buckets)

    def _rewrite(self, bucket: Bucket, gradients: Mapping[TrackedParameter, Tensor | None]) -> None:
        """Put into a sum what `p.grad` was set to. Whoever keeps what it was before shall find it so."""
        used = [member for member in bucket.members if member.used]
        if not used:
            bucket.drop()  # model.zero_grad(): the next gradient is the first again
            return
        for member in used:
            set_raw_grad(member.parameter, None)  # or our own would look as if somebody kept them
        _refuse_local(bucket)
        if bucket.summed:
            bucket.separate()
        else:
            bucket.set(zero=True)
        for member, gradient in gradients.items():
            assert member.local is not None, "every rank has room for the whole gradient"
            if gradient is None:
                member.local.zero_()
            else:
                member.local.copy_(gradient)
        for member in used:
            assert member.local is not None, "every rank has room for the whole gradient"
            set_raw_grad(member.parameter, member.local.detach())

    def suspects(self, buckets: BucketList) -> set[Bucket]:
        # `p.grad.data.mul_(2)` writes into the sum and leaves no version to go by.
        return {bucket for bucket in buckets.buckets if bucket.summed}

    def forget(self, buckets: BucketList) -> None:
        for member in buckets.parameters:
            set_raw_grad(member.parameter, None)
        self.seen, self.assigned = 0, []
        self._note(buckets)

    def _note(self, buckets: BucketList) -> None:
        self._versions = {bucket: bucket.sum._version for bucket in buckets.buckets}


class GatheredGrads(GradAccess):
    """`p.grad` is gathered from the owners of its slices when it is read."""

    def __init__(self, comm: Communicator, ready: Callable[[], bool]) -> None:
        super().__init__()
        self._comm = comm
        self._ready = ready
        self._gathered: dict[Bucket, Tensor] = {}
        self._set: dict[TrackedParameter, Tensor] = {}  # what `p.grad` was set to, not in the sums yet

    def follow(self, members: Iterable[TrackedParameter]) -> None:
        for member in members:
            shard_grad(member.parameter, self, member)

    def hide(self, buckets: BucketList) -> None:
        self.collect(buckets)

    def show(self, buckets: BucketList) -> None:
        pass  # they are gathered when they are read

    def has_grad(self, member: TrackedParameter) -> bool:
        """Whether `p.grad` would give something."""
        return self._ready() and member.used

    def read_grad(self, member: TrackedParameter) -> Tensor | None:
        """What `p.grad` gives."""
        if not self.has_grad(member):
            return None
        if member in self._set:
            return self._set[member]
        with labelled(f"reading the gradient of {member.name!r}", _ALONE):
            return member.shaped_in(self._gather(member.bucket))

    def write_grad(self, member: TrackedParameter, gradient: Tensor | None) -> None:
        """What `p.grad = gradient` does: all ranks must do it."""
        set_raw_grad(member.parameter, gradient)  # which has torch's own words for a shape or dtype that is wrong
        set_raw_grad(member.parameter, None)
        self._set.pop(member, None)
        if not self._ready():
            if gradient is None:
                return  # as zero_grad() does nothing inside a window
            raise SherdError(
                f"p.grad of {member.name!r} was set inside an accumulation window; do it after its last backward"
            )
        if gradient is None:
            self._discard(member)
            return
        _refuse_local(member.bucket)
        with labelled(f"p.grad = ... of {member.name!r}", _ALONE):
            self._gather(member.bucket)
        self._set[member] = gradient
        member.used = True
        self.assigned.append(member.name)

    def collect(self, buckets: BucketList) -> None:
        for bucket, whole in self._gathered.items():  # p.grad.data.clamp_() leaves no version to go by
            bucket.slice.copy_(whole.view(self._comm.world, -1)[self._comm.rank])
            bucket.set(zero=False)
            bucket.edited = True
            for member in bucket.members:
                if member in self._set:
                    self._put(member, self._set[member])
                elif not member.used:
                    self._put(member, None)  # dropped; who keeps what was gathered shall find it as it was
                if member.used:
                    self._see(self._set[member] if member in self._set else member.shaped_in(whole))
        self._gathered.clear()  # sums may be scaled or zeroed from here on
        self._set.clear()

    def forget(self, buckets: BucketList) -> None:
        self._gathered.clear()
        self._set.clear()
        self.seen, self.assigned = 0, []

    def _gather(self, bucket: Bucket) -> Tensor:
        if bucket not in self._gathered:
            bucket.begin()
            if not bucket.summed:
                bucket.slice.zero_()
            self._gathered[bucket] = self._comm.all_gather(bucket.slice).wait()
        return self._gathered[bucket]

    def _discard(self, member: TrackedParameter) -> None:
        if not member.used:
            return
        member.used = False
        bucket = member.bucket
        if not any(other.used for other in bucket.members):
            bucket.drop()
            self._gathered.pop(bucket, None)
        else:
            bucket.separate()
            self._put(member, None)
        bucket.edited = True

    def _put(self, member: TrackedParameter, gradient: Tensor | None) -> None:
        """Write this rank's part of a gradient, or zeros, into its slice."""
        flat = None if gradient is None else member.entry.flattened(gradient.detach().to_dense())
        for segment in member.segments():
            if segment.owner == self._comm.rank:
                own = member.bucket.slice[segment.offset : segment.offset + segment.numel]
                own.copy_(own.new_zeros(()) if flat is None else flat[segment.region.start :][: segment.numel])
