"""Parameters of which a rank keeps its slices, and everything else only while it is used."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sherd.comm import Communicator, Handle, labelled
from sherd.engine.buckets.bucket import Bucket, Values
from sherd.engine.buckets.checksum import checksum
from sherd.engine.buckets.memory import carve, numel_by_dtype
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.parameters import page_map
from sherd.engine.parameters.gathered.gathering import Gathering
from sherd.engine.parameters.gathered.on_use import gather_on_use
from sherd.engine.parameters.gathered.pages import Pages, make_pages
from sherd.engine.parameters.isolation import bypass_torch_function
from sherd.engine.parameters.store import Members, ParameterStore
from sherd.layout import slicing
from sherd.layout.entry import dtype_of

_numbers: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()
"""How many models the ranks of each communicator have distributed, in the same order on all of them."""


@dataclass
class GatheredValues(Values):
    """The values of a bucket that is gathered on use: `whole` exists from then until it is released."""

    rows: Tensor
    """the part that this rank holds for its group (see `mesh`)"""
    pages: Pages
    name: str
    """names the bucket in calls that gather it"""


class GatheredStore(ParameterStore):
    """Every rank has its rows (see `mesh`); a bucket, frozen or not, is whole on a rank while it is used there."""

    whole = False
    compares_edits = True

    @property
    def sees_all_edits(self) -> bool:  # type: ignore[override]
        return page_map.can_tell() and self._device.type == "cpu"

    @property
    def finds_edits(self) -> bool:  # type: ignore[override]
        return self.sees_all_edits

    def _make_room(self, buckets: Sequence[Bucket]) -> None:
        described = [bucket.described for bucket in buckets]
        sizes = numel_by_dtype(described, self._kept)
        self._flats = {
            dtype: torch.zeros(size, dtype=dtype_of(dtype), device=self._device) for dtype, size in sizes.items()
        }
        number = _numbers[self._comm] = _numbers.get(self._comm, 0) + 1
        self._written: dict[TrackedParameter, int] = {}  # digests of what this rank wrote into buckets released since
        self._places: dict[int, Bucket] = {}
        for bucket, flat in zip(buckets, carve(self._flats, described, self._kept), strict=True):
            pages, name = self._make_pages(bucket), f"{_listed(bucket)} of model {number}"
            if bucket.holder is None:
                rows = flat.view(self._mesh.groups, -1)
                owned = rows[self._mesh.replicate.rank]
            else:
                rows, owned = flat.view(1, -1), flat if bucket.holder == self._owner else flat[:0]
            bucket.values = GatheredValues(pages.memory, owned, rows, pages, name)
            self._places[pages.memory.untyped_storage()._cdata] = bucket
            for member in bucket.members:
                member.home = member.shaped_in(pages.memory)
            pages.release()
        self.gathering = Gathering(self._fetch, self._release, self._write_back, self._is_written)

    def take_over(self) -> None:
        """Take over rank 0's values and free the old memory, one parameter at a time."""
        self.from_leader(member.parameter for member in self._members)
        for member in self._members:
            self._put(member, member.parameter.detach())
            member.parameter.data = member.home
            gather_on_use(member.parameter, self)

    # ---------------------------------------------------------------- on use

    def bucket_of(self, tensor: Tensor) -> Bucket | None:
        """The bucket whose memory contains the tensor, if it is in the store."""
        try:
            return self._places.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # no address: sparse, or wrapped by a transform
            return None

    def places(self, parameters: Iterable[nn.Parameter]) -> list[object]:
        return [self._place(parameter) for parameter in parameters]

    def _place(self, parameter: nn.Parameter) -> object:
        bucket = self.bucket_of(parameter)
        return parameter.data_ptr() if bucket is None else (bucket, parameter.storage_offset())

    def _make_pages(self, bucket: Bucket) -> Pages:
        return make_pages(bucket.described.numel, bucket.dtype, self._device)

    def _fetch(self, bucket: Bucket) -> Handle:
        values = values_of(bucket)
        values.pages.acquire()
        return self._gather(bucket, values.pages.target)

    def _gather(self, bucket: Bucket, whole: Tensor) -> Handle:
        """Gather a bucket from the ranks of this group, which hold its rows."""
        # The name makes ranks that gather different buckets of the same size fail.
        rows, name = values_of(bucket).rows, values_of(bucket).name
        if bucket.holder is None:
            return self._mesh.gather(rows, whole, name)
        shard = self._mesh.shard
        place = bucket.holder % shard.world
        return shard.broadcast(whole, place, source=rows[0] if place == shard.rank else None, what=name)

    def _kept(self, described: slicing.Bucket) -> int:
        """Elements of a bucket that this rank holds for its group."""
        if described.holder is None:
            return self._mesh.groups * described.slice_numel
        return described.numel if self._holds(described.holder) else 0

    def _holds(self, holder: int) -> bool:
        """Whether this rank holds what `holder` owns whole for its group: each group has a copy, at the same place."""
        return holder % self._mesh.shard.world == self._mesh.shard.rank

    def _release(self, bucket: Bucket) -> None:
        values_of(bucket).pages.release()

    def _is_written(self, bucket: Bucket) -> bool:
        return values_of(bucket).pages.written()

    def _write_back(self, bucket: Bucket) -> None:
        """Keep this rank's rows of what it wrote, and digests of all of it to compare with the other ranks'."""
        values = values_of(bucket)
        if bucket.holder is None:
            values.rows.copy_(self._mesh.rows(values.whole))
        elif self._holds(bucket.holder):
            values.rows[0].copy_(values.whole)
        with bypass_torch_function():
            for member in bucket.members:
                self._written[member] = checksum(member.entry.flattened(member.home))

    # ---------------------------------------------------------------- a step

    def acquire(self, buckets: Sequence[Bucket]) -> None:
        super().acquire(buckets)
        self.gathering.drop(buckets)

    def _publish(self, buckets: Sequence[Bucket]) -> None:
        self.gathering.steps += 1
        if self._mesh.groups > 1:
            for handle in [self._spread(bucket) for bucket in buckets if self._kept(bucket.described)]:
                handle.wait()
        self.gathering.refresh()
        self.bump(buckets)

    def _spread(self, bucket: Bucket) -> Handle:
        """Send what its owners have updated to the other groups."""
        values = values_of(bucket)
        if bucket.holder is None:
            return self._mesh.spread(values.owned, values.rows)
        return self._mesh.replicate.broadcast(values.rows[0], bucket.holder // self._mesh.shard.world)

    # ---------------------------------------------------------------- edits

    def edited(self, suspects: Iterable[TrackedParameter]) -> set[TrackedParameter]:
        found = set(suspects).union(self._written)
        for bucket in self.gathering.written():
            found.update(bucket.members)
        return found

    def digests(self, members: Members) -> list[int]:
        here = set(self.gathering.gathered)  # these still hold what was written into them
        for bucket in _buckets(members):
            self.gathering.touch(bucket)
        return [
            self._written[member]
            if member in self._written and member.bucket not in here
            else checksum(member.flattened)
            for member in members
        ]

    def keep_edits(self, members: Members) -> None:
        moved = {member: member.parameter.detach().clone() for member in members if _is_moved(member)}
        self.gathering.drop(_buckets(members))
        for member, value in moved.items():
            self._put(member, value)
        self.take_back(moved)
        self._written.clear()
        self.gathering.refresh()

    def lend(self, members: Members) -> None:
        with labelled("full_parameters, or load_state_dict"):
            for member in members:
                self.gathering.touch(member.bucket)
                member.parameter.data = member.home.clone()

    def take_back(self, members: Iterable[TrackedParameter]) -> None:
        for member in members:
            member.parameter.data = member.home

    def write(self, members: Members) -> None:
        self.gathering.drop(_buckets(members))
        for member in members:
            self._written.pop(member, None)
        self.from_leader(member.parameter for member in members)
        for member in members:
            self._put(member, member.parameter.detach())
        self.take_back(members)
        self.gathering.refresh()

    def _put(self, member: TrackedParameter, value: Tensor) -> None:
        """Keep this rank's part of a whole parameter."""
        flat, rows = member.entry.flattened(value), values_of(member.bucket).rows
        for segment in member.segments():
            group, place = divmod(segment.owner, self._mesh.shard.world)
            if place == self._mesh.shard.rank:
                part = flat[segment.region.start : segment.region.start + segment.numel]
                row = rows[group if member.bucket.holder is None else 0]
                row[segment.offset : segment.offset + segment.numel].copy_(part)

    # ---------------------------------------------------------------- bytes

    def bytes(self) -> int:
        return sum(flat.nbytes for flat in self._flats.values())

    def gathered_bytes(self) -> int:
        return sum(bucket.values.whole.nbytes for bucket in self.gathering.gathered)


def values_of(bucket: Bucket) -> GatheredValues:
    """The values of a bucket that is gathered on use."""
    assert isinstance(bucket.values, GatheredValues), "this store created them"
    return bucket.values


def _is_moved(member: TrackedParameter) -> bool:
    with bypass_torch_function():
        return not member.parameter.is_set_to(member.home)


def _buckets(members: Iterable[TrackedParameter]) -> list[Bucket]:
    """The buckets of these parameters, in the order of their memory: the same on every rank."""
    return sorted({member.bucket for member in members}, key=lambda bucket: bucket.described.index)


def _listed(bucket: Bucket) -> str:
    names = [member.name for member in bucket.members]
    between = ", ..., " if len(names) > 2 else ", "
    return names[0] if len(names) == 1 else f"{names[0]}{between}{names[-1]}"
