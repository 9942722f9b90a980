"""Parameters of which a host has one copy, mapped by all its ranks.

Each rank maps it twice. The slices that it updates in place are in a mapping that all ranks share. Its
`parameter.data` is in a private one (see `copy_on_write`): there it reads every rank's updates, and whatever it writes
stays private. Before the next update the ranks compare what they wrote; if that is the same everywhere, it is stored
once.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from sherd.comm import Handle
from sherd.comm.host.memory import PAGE
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.memory import carve
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.parameters import page_map
from sherd.engine.parameters.copy_on_write import CopyOnWrite
from sherd.engine.parameters.flat_stores import FlatStore, home_in, moved, values_of_moved
from sherd.engine.parameters.store import Members

log = logging.getLogger("sherd")


class HostStore(FlatStore):
    """One copy on each host: an update sends messages between hosts only."""

    @property
    def compares_edits(self) -> bool:  # type: ignore[override]
        return bool(self._own_views)

    @property
    def sees_all_edits(self) -> bool:  # type: ignore[override]
        return page_map.can_tell() if self._own_views else self._comm.world == 1

    @property
    def finds_edits(self) -> bool:  # type: ignore[override]
        return bool(self._own_views) and page_map.can_tell()

    def _publish(self, buckets: Sequence[Bucket]) -> None:
        # Before the update no barrier was needed: comparing edits has synchronised the ranks.
        if self._alone:
            self._comm.barrier().wait()
        else:
            for handle in [self._publish_one(bucket) for bucket in buckets]:
                handle.wait()
        self.bump(buckets)

    def _publish_one(self, bucket: Bucket) -> Handle:
        values = bucket.values
        if bucket.holder is not None:
            return bucket.gather(values.owned, values.whole)
        return self._comm.publish(values.owned, values.whole)

    # ---------------------------------------------------------------- edits

    def edited(self, suspects: Iterable[TrackedParameter]) -> set[TrackedParameter]:
        if not self._own_views:
            return super().edited(suspects)
        suspects = set(suspects)
        elsewhere = set(moved(suspects))
        found = {member for member in elsewhere if not _is_common(member)}
        self.take_back(elsewhere - found)
        return found.union(self._written(suspects - found))

    def keep_edits(self, members: Members) -> None:
        self._store_once(members)
        self.take_back(members)
        self._written(members)  # gives back the pages that are common again
        self._comm.host.barrier().wait()  # an update may follow at once, and change pages that others still compare

    def write(self, members: Members) -> None:
        if not self._alone:
            self.from_leader(member.parameter for member in members)
        self._comm.host.barrier().wait()
        self._store_once(members)
        self.take_back(members)
        # What this rank wrote into them before no longer counts.
        for member in self._written(members).intersection(members):
            member.home.copy_(member.original)
        self._written(members)

    def _store_once(self, members: Members) -> None:
        """Take the values of the host's first rank for all its ranks."""
        if self._comm.host.rank == 0:
            elsewhere = values_of_moved(members)
            for member in members:
                member.original.copy_(elsewhere.get(member, member.parameter.detach()))
        self._comm.host.barrier().wait()

    def _written(self, suspects: Iterable[TrackedParameter]) -> set[TrackedParameter]:
        """The parameters in which this rank wrote something that differs from the common copy. Gives back other pages.

        Where the page map cannot tell, only the pages of `suspects` are checked.
        """
        found: set[TrackedParameter] = set()
        for dtype, view in self._own_views.items():
            if page_map.can_tell():
                pages = view.written()
            else:
                pages = [view.pages_of(member.home) for member in suspects if member.entry.dtype == dtype]
            for start, stop in view.give_back(pages):
                among = self._places[dtype].within(start * PAGE, stop * PAGE)
                different = {member for member in among if member in found or not _is_common(member)}
                found |= different
                if not different:
                    view.drop(start, stop)  # they differ only in padding, and would hide updates
        return found

    # ---------------------------------------------------------------- memory

    def bytes(self) -> int:
        return super().bytes() if self._comm.host.rank == 0 else 0

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._comm.shared_tensor(numel, dtype=dtype)

    def _make_room(self, buckets: Sequence[Bucket]) -> None:
        super()._make_room(buckets)
        backings = {dtype: self._comm.backing(flat) for dtype, flat in self._flats.items()}
        self._own_views = {d: CopyOnWrite(self._flats[d], backing) for d, backing in backings.items() if backing}
        if not self._own_views:
            return  # alone on this host
        if not page_map.can_tell() and self._comm.rank == 0:
            _say_unseen()
        memory = {dtype: view.memory for dtype, view in self._own_views.items()}
        described = [bucket.described for bucket in buckets]
        for bucket, whole in zip(buckets, carve(memory, described, lambda each: each.numel), strict=True):
            for member in bucket.members:
                member.home = home_in(whole, member)
        self._places = {dtype: _Places(flat, self._members) for dtype, flat in memory.items()}

    def _fill(self) -> None:
        if not self._alone:
            self.from_leader(member.parameter for member in self._members)
        if self._comm.host.rank == 0:
            self._copy_in()
        self._comm.host.barrier().wait()

    @property
    def _alone(self) -> bool:
        """Whether there is only this host."""
        return self._comm.host.world == self._comm.world


class _Places:
    """The positions of parameters in a flat tensor of their dtype."""

    def __init__(self, flat: Tensor, members: Members) -> None:
        those = [member for member in members if member.home.dtype == flat.dtype and member.home.numel()]
        found = {member.home.data_ptr() - flat.data_ptr(): member for member in those}
        self._begins = sorted(found)
        self._members = [found[begin] for begin in self._begins]

    def within(self, start: int, stop: int) -> list[TrackedParameter]:
        """The parameters with some of the bytes `[start, stop)`, and perhaps one without."""
        first = max(bisect_right(self._begins, start) - 1, 0)
        return self._members[first : bisect_left(self._begins, stop)]


def _is_common(member: TrackedParameter) -> bool:
    own, common = member.flattened, member.entry.flattened(member.original)
    return torch.equal(own.view(torch.uint8), common.view(torch.uint8))  # bits: NaN is NaN, and 0.0 is not -0.0


@cache
def _say_unseen() -> None:
    log.warning(
        "the page map of this process (/proc/self/pagemap) cannot be read, so edits of parameters through .data or "
        'numpy are not detected; sherd.distribute(..., check="edits") finds them, at the cost of reading all '
        "parameters twice per step"
    )
