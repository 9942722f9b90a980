"""Parameters of which a host has one copy, that all its ranks map.

Each rank maps it twice. Its slices, which it updates in place, lie in a mapping that all ranks share. Its
`parameter.data` lies in a private one (see `copy_on_write`): there it reads everybody's updates, and what it writes by
whatever route stays its own. Before the next update the ranks compare what they wrote, and if that is the same
everywhere, it is stored once.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

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
    """One copy on each host: an update needs messages between hosts only."""

    @property
    def compares_edits(self) -> bool:  # type: ignore[override]
        return bool(self._own_views)

    @property
    def sees_all_edits(self) -> bool:  # type: ignore[override]
        return page_map.can_tell() if self._own_views else self._comm.world == 1

    def _publish(self, buckets: Sequence[Bucket]) -> None:
        # Nobody was waited for before the update: comparing edits has done so, and alone there is nobody.
        if self._alone:
            self._comm.barrier().wait()
        else:
            values = [bucket.values for bucket in buckets]
            for handle in [self._comm.publish(each.owned, each.whole) for each in values]:
                handle.wait()
        self.bump(buckets)

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
        self._written(members)  # which gives back the pages that are common again
        self._comm.host.barrier().wait()  # an update may follow at once, and would make pages differ that do not

    def write(self, members: Members) -> None:
        if not self._alone:
            self.from_leader(member.parameter for member in members)
        self._comm.host.barrier().wait()
        self._store_once(members)
        self.take_back(members)
        # What this rank wrote into them before counts no more.
        for member in self._written(members).intersection(members):
            member.home.copy_(member.original)
        self._written(members)

    def _store_once(self, members: Members) -> None:
        """The first rank of the host has the values that all shall have."""
        if self._comm.host.rank == 0:
            elsewhere = values_of_moved(members)
            for member in members:
                member.original.copy_(elsewhere.get(member, member.parameter.detach()))
        self._comm.host.barrier().wait()

    def _written(self, suspects: Iterable[TrackedParameter]) -> set[TrackedParameter]:
        """The parameters that differ from the common copy in what this rank has written. Gives back all other pages.

        Where the page map cannot tell, only pages of `suspects` are looked at.
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
                    view.drop(start, stop)  # they differ in padding alone, and would hide updates
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
    """Where parameters lie in a flat tensor of their dtype."""

    def __init__(self, flat: Tensor, members: Members) -> None:
        those = [member for member in members if member.home.dtype == flat.dtype and member.home.numel()]
        found = {member.home.data_ptr() - flat.data_ptr(): member for member in those}
        self._begins = sorted(found)
        self._members = [found[begin] for begin in self._begins]

    def within(self, start: int, stop: int) -> list[TrackedParameter]:
        """The parameters that may have some of the bytes `[start, stop)`: all that have, and one more at the most."""
        first = max(bisect_right(self._begins, start) - 1, 0)
        return self._members[first : bisect_left(self._begins, stop)]


def _is_common(member: TrackedParameter) -> bool:
    own, common = member.flattened, member.entry.flattened(member.original)
    return torch.equal(own.view(torch.uint8), common.view(torch.uint8))  # bits: NaN is NaN, and 0.0 is not -0.0


@cache
def _say_unseen() -> None:
    log.warning(
        "the page map of this process (/proc/self/pagemap) cannot be read, so edits of parameters through .data or "
        'numpy go unseen; sherd.distribute(..., check="edits") finds them, at the cost of reading all parameters twice '
        "per step"
    )
