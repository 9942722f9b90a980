"""`p.grad` where a rank keeps slices of the sums: what it does when it is read, scaled, kept or set (see `access`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sherd.comm import Communicator, labelled
from sherd.engine.buckets.bucket import Bucket, gather
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.checksum import checksum
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.gradients.access import GradAccess, members_of
from sherd.engine.gradients.sharded_gradient import ShardedGradient
from sherd.engine.gradients.sharded_norms import norms_at_owners
from sherd.engine.parameters.isolation import bypass_torch_function
from sherd.errors import SherdError
from sherd.patches import foreach

ALONE = "Under ZeRO p.grad is gathered from all ranks: read or set it on every rank"


def _references(kept: Mapping[Any, object], key: Any) -> int:
    value = kept[key]
    return sys.getrefcount(value)


_UNSHARED = _references({0: object()}, 0)
"""What it counts for an object that only the mapping holds: the interpreter's own references differ by version."""


class _Gathered:
    """The whole gradient of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self.whole = bucket.gather(bucket.slice).wait()
        self._members = [each.shaped_in(self.whole) for each in bucket.members]
        self.lent = False
        """Whether the program may have written into it. Else the slices are what counts."""
        self.behind: list[tuple[int, str, tuple[Any, ...]]] = []
        """What was done to the slices since, by member."""

    def of(self, member: TrackedParameter) -> Tensor:
        """The gradient of a member of the bucket."""
        for position, how, by in self.behind:
            getattr(self._members[position], how)(*by)
        self.behind.clear()
        return self._members[member.position]


class ShardedAccess(GradAccess):
    """`p.grad` is gathered from the owners of its slices when it is used."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        foreach.install(ShardedGradient)
        self._comm = comm
        self._views: dict[TrackedParameter, ShardedGradient] = {}
        self._gathered: dict[Bucket, _Gathered] = {}
        self._scaled: set[Bucket] = set()

    def hide(self, buckets: BucketList, filling: Iterable[Bucket]) -> None:
        with bypass_torch_function():
            too_early = next((m.name for m in members_of(filling) if m.parameter.grad is not None), None)
        if too_early is not None:
            raise SherdError(
                f"p.grad of {too_early!r} was set inside an accumulation window; do it after its last backward"
            )
        super().hide(buckets, filling)

    def read(self, member: TrackedParameter, lend: bool = True) -> Tensor:
        """The whole gradient of a parameter. Collective."""
        bucket = member.bucket
        if bucket not in self._gathered:
            with labelled(f"reading the gradient of {member.name!r}", ALONE):
                self._gathered[bucket] = _Gathered(bucket)
        self._gathered[bucket].lent |= lend
        return self._gathered[bucket].of(member)

    def norms(self, members: Sequence[TrackedParameter], order: Any) -> tuple[Tensor, ...] | None:
        """Norms of whole gradients, with torch's bits; None if they have to be gathered for that. Collective."""
        if any(member.bucket in self._gathered for member in members):
            return None
        with labelled(f"the norms of {len(members)} gradients", ALONE):
            return norms_at_owners(self._comm, members, order)

    def scale(self, member: TrackedParameter, how: str, by: tuple[Any, ...]) -> bool:
        """Scale this rank's part of a gradient; return False if it was lent, and so must be scaled as a whole."""
        gathered = self._gathered.get(member.bucket)
        if not member.bucket.summed or (gathered is not None and gathered.lent):
            return False
        for own, _ in member.own_parts():
            # The dtype in which torch multiplies by a tensor without dimensions depends on whether both have none.
            getattr(own if member.entry.shape else own.view(()), how)(*by)
        if gathered is not None:
            then = tuple(each.clone() if isinstance(each, Tensor) else each for each in by)
            gathered.behind.append((member.position, how, then))
        self._scaled.add(member.bucket)
        self._note_seen(member.bucket, (member.name, how, [float(each) for each in by]))
        return True

    def unscale(self, members: Sequence[TrackedParameter], found_inf: Tensor, inverse: Tensor) -> bool:
        """As a GradScaler does, on this rank's parts; return False if any was lent or is not summed."""
        buckets = dict.fromkeys(member.bucket for member in members)
        if self._lent().intersection(buckets) or not all(bucket.summed for bucket in buckets):
            return False
        for bucket in buckets:
            self._gathered.pop(bucket, None)
        if parts := [own for member in members for own, _ in member.own_parts()]:
            torch._amp_foreach_non_finite_check_and_unscale_(parts, found_inf, inverse)
        with labelled("the overflows that a GradScaler looks for", ALONE), self._comm.counters.agreeing():
            total = self._comm.all_reduce(found_inf.detach().reshape(1).float().cpu()).wait()
        found_inf.fill_(float(total.item() != 0))
        self._scaled.update(buckets)
        for bucket in buckets:
            names = [member.name for member in members if member.bucket is bucket]
            self._note_seen(bucket, (names, "unscale", float(inverse)))
        return True

    def _view(self, member: TrackedParameter) -> Tensor:
        view = self._views.get(member)
        if view is None:
            view = self._views[member] = ShardedGradient(member, self)
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
        self._let_go(members_of(buckets))
        for bucket in buckets:
            self._gathered.pop(bucket, None)  # sums may be scaled or zeroed from here on
            self._scaled.discard(bucket)

    def _rewrite(self, bucket: Bucket, gradients: Mapping[TrackedParameter, Tensor | None]) -> None:
        for member in gradients:
            member.parameter.grad = None
        self._let_go(gradients)
        super()._rewrite(bucket, gradients)
        if not bucket.summed:
            self._gathered.pop(bucket, None)

    def _let_go(self, members: Iterable[TrackedParameter]) -> None:
        """Release these gradients. Those that the program keeps retain their values and may be read later."""
        for member in [member for member in members if member in self._views]:
            if _references(self._views, member) > _UNSHARED or self._views[member]._use_count() > 1:  # type: ignore[attr-defined]
                self._views.pop(member).keep(self._reader(member))

    def _reader(self, member: TrackedParameter) -> Callable[[], Tensor]:
        """What reads the gradient of now, later. Holding it keeps its memory from being used for the next one.

        It holds nothing that leads to the parameter, which may hold the gradient in turn.
        """
        comm, name, entry, start = member.bucket.comm, member.name, member.entry, member.offset
        described = member.bucket.described
        found: list[Tensor] = []
        if member.bucket in self._gathered:
            found.append(self.read(member))
        part = member.bucket.slice.detach()

        def read() -> Tensor:
            if not found:
                with labelled(f"reading a gradient of {name!r} that was kept", ALONE):
                    whole = gather(comm, described, part).wait()
                found.append(entry.shaped(whole[start : start + entry.numel]))
            return found[0]

        return read

    def __del__(self) -> None:
        # The model is gone. A program may still hold its gradients.
        for member, view in self._views.items():
            view.keep(self._reader(member))

    def _changed(self, buckets: BucketList) -> set[Bucket]:
        lent = self._lent()
        for bucket in lent:  # p.grad.data.clamp_() changes no version
            bucket.slice.copy_(bucket.part_of(self._gathered[bucket].whole))
        return {*lent, *self._scaled}

    def _lent(self) -> set[Bucket]:
        return {bucket for bucket, gathered in self._gathered.items() if gathered.lent}

    def collect(self, buckets: BucketList) -> None:
        super().collect(buckets)
        self._gathered.clear()  # sums may be scaled or zeroed from here on
        self._scaled.clear()

    def _see(self, bucket: Bucket, set_to: Mapping[TrackedParameter, Tensor | None]) -> None:
        if (gathered := self._gathered.get(bucket)) is not None and gathered.lent:
            self._note_seen(bucket, checksum(gathered.whole))
        for gradient in set_to.values():
            if gradient is not None:
                self._note_seen(bucket, checksum(gradient))

    def _put(self, member: TrackedParameter, gradient: Tensor | None) -> None:
        flat = None if gradient is None else member.entry.flattened(gradient.detach().to_dense())
        for own, start in member.own_parts():
            own.copy_(own.new_zeros(()) if flat is None else flat[start : start + own.numel()])
