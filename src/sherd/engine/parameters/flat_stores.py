"""Stores in which every rank has all parameters, flat, bucket after bucket."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sherd.comm import Handle
from sherd.engine.buckets.bucket import Bucket, Values
from sherd.engine.buckets.memory import carve, numel_by_dtype, with_own_storage
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.parameters.store import Members, ParameterStore
from sherd.layout.entry import dtype_of


class FlatStore(ParameterStore):
    """Buckets of parameters laid end to end, one allocation per dtype."""

    def _make_room(self, buckets: Sequence[Bucket]) -> None:
        described = [bucket.described for bucket in buckets]
        sizes = numel_by_dtype(described, lambda each: each.numel)
        self._flats = {dtype: self._allocate(size, dtype_of(dtype)) for dtype, size in sizes.items()}
        for bucket, whole in zip(buckets, carve(self._flats, described, lambda each: each.numel), strict=True):
            owned = whole if self._owner is None else whole[slice(*bucket.described.span(self._owner))]
            bucket.values = Values(whole, owned)
            for member in bucket.members:
                member.original = member.home = home_in(whole, member)

    def take_over(self) -> None:
        self._fill()
        self.take_back(self._members)

    def take_back(self, members: Iterable[TrackedParameter]) -> None:
        for member in members:
            member.parameter.data = member.home

    def lend(self, members: Members) -> None:
        for member in members:
            member.parameter.data = member.home.clone()

    def write(self, members: Members) -> None:
        if self._comm.rank == 0:
            for member in members:
                member.original.copy_(member.parameter.detach())
        self.from_leader(member.original for member in members)
        self.take_back(members)

    def edited(self, suspects: Iterable[TrackedParameter]) -> set[TrackedParameter]:
        suspects = set(suspects)
        moved = values_of_moved(suspects)
        for member, value in moved.items():
            member.home.copy_(value)
        self.take_back(moved)
        return suspects

    def bytes(self) -> int:
        return sum(flat.nbytes for flat in self._flats.values())

    @abstractmethod
    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor: ...

    @abstractmethod
    def _fill(self) -> None:
        """Put rank 0's values into the store."""

    def _copy_in(self) -> None:
        for member in self._members:
            member.original.copy_(member.parameter.detach())


class PrivateStore(FlatStore):
    """Every rank has a copy of all parameters. It updates all of them, or owners update slices, which are gathered."""

    @property
    def owns_memory(self) -> bool:  # type: ignore[override]
        return self.updates_slices

    def _make_room(self, buckets: Sequence[Bucket]) -> None:
        super()._make_room(buckets)
        self._outside: set[TrackedParameter] = set()  # their homes were moved by share_memory()
        if self._owner is None:
            for member in self._members:
                member.original = member.shaped_in(member.bucket.values.whole)

    def acquire(self, buckets: Sequence[Bucket]) -> None:
        super().acquire(buckets)
        for member in self._outside:
            member.original.copy_(member.home)

    def edited(self, suspects: Iterable[TrackedParameter]) -> set[TrackedParameter]:
        suspects = super().edited(suspects)
        if self._owner is None:
            self._outside.update(member for member in suspects if member.moved_home)
        return suspects

    def write(self, members: Members) -> None:
        super().write(members)
        self._send_outside()

    def _send_outside(self) -> None:
        for member in self._outside:
            member.home.copy_(member.original)

    def _publish(self, buckets: Sequence[Bucket]) -> None:
        if self._owner is None:
            self._send_outside()
        elif self._mesh.groups > 1:
            self._publish_by_rows(buckets)
        else:
            for handle in [bucket.gather(bucket.values.owned, bucket.values.whole) for bucket in buckets]:
                handle.wait()
        self.bump(buckets)

    def _publish_by_rows(self, buckets: Sequence[Bucket]) -> None:
        """First between groups, where each slice is sent once, then inside them; a few buckets at a time."""
        under_way: deque[Handle] = deque()
        for bucket in buckets:
            owned = bucket.values.owned
            if bucket.holder is not None:
                under_way.append(bucket.gather(owned, bucket.values.whole))
            else:
                rows = owned.new_empty(self._mesh.groups, owned.numel())
                self._mesh.spread(owned, rows).wait()
                under_way.append(self._mesh.gather(rows, bucket.values.whole))
            if len(under_way) > 2:
                under_way.popleft().wait()
        for handle in under_way:
            handle.wait()

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def _fill(self) -> None:
        self._copy_in()
        self.from_leader(self._flats.values())


def home_in(whole: Tensor, member: TrackedParameter) -> Tensor:
    """The view of a member in the memory of its bucket."""
    flat = whole[member.offset : member.offset + member.entry.numel]
    return member.entry.shaped(with_own_storage(flat))


def moved(members: Iterable[TrackedParameter]) -> list[TrackedParameter]:
    """The parameters whose data is no longer the store's memory: `p.data = x`."""
    return [member for member in members if not member.parameter.is_set_to(member.home)]


def values_of_moved(members: Iterable[TrackedParameter]) -> dict[TrackedParameter, Tensor]:
    """Copies of what these have instead: maybe another parameter's home, as in `a.data, b.data = b.data, a.data`."""
    return {member: member.parameter.detach().clone() for member in moved(members)}
