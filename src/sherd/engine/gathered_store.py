"""Parameters of which a rank keeps its slices, and the rest only while it is used."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sherd.comm import Communicator, Handle, labelled
from sherd.engine import page_map
from sherd.engine.apart import bypass_torch_function
from sherd.engine.checksum import checksum
from sherd.engine.flat import carve, numel_by_dtype
from sherd.engine.gathering import Gathering
from sherd.engine.on_use import gather_on_use
from sherd.engine.pages import Pages, make_pages
from sherd.engine.stores import ParameterStore
from sherd.layout.entry import dtype_of
from sherd.layout.slicing import Bucket

_numbers: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()
"""How many models each communicator's ranks have distributed, which they do in the same order."""


class GatheredStore(ParameterStore):
    """Every rank has its rows (see `mesh`); a bucket is whole on a rank while it is used there. Frozen ones too."""

    whole = False
    compares_edits = True

    @property
    def sees_all_edits(self) -> bool:  # type: ignore[override]
        return page_map.can_tell() and self._device.type == "cpu"

    def _make_room(self) -> list[Tensor]:
        trained, frozen = self._trained, self._trained.frozen
        self._layout = layout = trained.layout.grown(trained.inventory.entries(frozen))
        self._order = (*trained.indices, *frozen)
        self._entries = {index: entry for entry, index in enumerate(self._order)}
        groups = self._mesh.groups
        self._flats = {
            dtype: torch.zeros(size, dtype=dtype_of(dtype), device=self._device)
            for dtype, size in numel_by_dtype(layout.buckets, lambda bucket: groups * bucket.slice_numel).items()
        }
        rows = carve(self._flats, layout.buckets, lambda bucket: groups * bucket.slice_numel)
        self._rows = [each.view(groups, -1) for each in rows]
        self._pages = self._make_pages(layout.buckets)
        self._places = {each.memory.untyped_storage()._cdata: index for index, each in enumerate(self._pages)}
        number = _numbers[self._comm] = _numbers.get(self._comm, 0) + 1
        self._names = [self._name(bucket, number) for bucket in layout.buckets]
        self._written: dict[int, int] = {}  # digests of what this rank had written into buckets that were released
        self.gathering = Gathering(self._names, self._fetch, self._release, self._write_back, self._is_written)
        self._homes = [self._home(index) for index in range(len(self._parameters))]
        for pages in self._pages:
            pages.release()
        trainable = len(trained.layout.buckets)
        self._changing = list(range(trainable))  # the buckets of which there are slices to update
        return [self._slice(bucket) for bucket in self._changing]

    # ---------------------------------------------------------------- on use

    def bucket_of(self, tensor: Tensor) -> int | None:
        """The bucket in whose memory a tensor lies, if it is the store's."""
        try:
            return self._places.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # it has none: sparse, or of a transform
            return None

    def place(self, index: int) -> object:
        parameter = self._parameters[index]
        with bypass_torch_function():
            bucket = self.bucket_of(parameter)
            return parameter.data_ptr() if bucket is None else (bucket, parameter.storage_offset())

    def _make_pages(self, buckets: Sequence[Bucket]) -> Sequence[Pages]:
        return [make_pages(bucket.numel, dtype_of(bucket.dtype), self._device) for bucket in buckets]

    def _fetch(self, bucket: int) -> Handle:
        self._pages[bucket].acquire()
        # By name: ranks that gather different buckets of one size must find out.
        return self._mesh.gather(self._rows[bucket], self._pages[bucket].target, self._names[bucket])

    def _release(self, bucket: int) -> None:
        self._pages[bucket].release()

    def _is_written(self, bucket: int) -> bool:
        return self._pages[bucket].written()

    def _write_back(self, bucket: int) -> None:
        """Keep this rank's rows of what it wrote, and remember all of it, to be compared with the other ranks'."""
        self._rows[bucket].copy_(self._mesh.rows(self._pages[bucket].memory))
        with bypass_torch_function():
            for index in self._members(bucket):
                entry = self._trained.inventory.entry(index)
                self._written[index] = checksum(entry.flattened(self._homes[index]))

    def _slice(self, bucket: int) -> Tensor:
        """What this rank updates of a bucket."""
        return self._rows[bucket][self._mesh.replicate.rank]

    # ---------------------------------------------------------------- a step

    def acquire(self) -> None:
        self.gathering.drop(self._changing)

    def publish(self) -> None:
        self.gathering.steps += 1
        if self._mesh.groups > 1:
            for handle in [self._mesh.spread(self._slice(bucket), self._rows[bucket]) for bucket in self._changing]:
                handle.wait()
        self.gathering.refresh()
        self.bump()

    def grow(self, indices: Sequence[int]) -> None:
        for index in indices:
            bucket = self._bucket(index)
            self._changing.append(bucket)
            self.slices.append(self._slice(bucket))

    # ---------------------------------------------------------------- edits

    def edited(self, suspects: Iterable[int]) -> set[int]:
        found = set(suspects).union(self._written)
        for bucket in self.gathering.written():
            found.update(self._members(bucket))
        return found

    def digests(self, indices: Sequence[int]) -> list[int]:
        here = set(self.gathering.gathered)  # what was written into these was not released since
        for bucket in self._buckets(indices):
            self.gathering.touch(bucket)
        return [
            self._written[index]
            if index in self._written and self._bucket(index) not in here
            else checksum(self._flattened(index))
            for index in indices
        ]

    def keep_edits(self, indices: Sequence[int]) -> None:
        moved = {i: self._parameters[i].detach().clone() for i in indices if self._is_moved(i)}
        self.gathering.drop(self._buckets(indices))
        for index, value in moved.items():
            self._put(index, value)
        self.take_back(moved)
        self._written.clear()
        self.gathering.refresh()

    def _is_moved(self, index: int) -> bool:
        with bypass_torch_function():
            return not self._parameters[index].is_set_to(self._homes[index])

    def lend(self, indices: Sequence[int]) -> None:
        with labelled("full_parameters, or load_state_dict"):
            for index in indices:
                self.gathering.touch(self._bucket(index))
                self._parameters[index].data = self._homes[index].clone()

    def take_back(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._parameters[index].data = self._homes[index]

    def write(self, indices: Sequence[int]) -> None:
        self.gathering.drop(self._buckets(indices))
        for index in indices:
            self._written.pop(index, None)
        self.from_leader(self._parameters[index] for index in indices)
        for index in indices:
            self._put(index, self._parameters[index].detach())
        self.take_back(indices)
        self.gathering.refresh()

    def _put(self, index: int, value: Tensor) -> None:
        """Keep this rank's part of a whole parameter."""
        entry = self._entries[index]
        flat = self._layout.entries[entry].flattened(value)
        for segment in self._layout.segments_of(entry):
            group, place = divmod(segment.owner, self._mesh.shard.world)
            if place == self._mesh.shard.rank:
                part = flat[segment.region.start : segment.region.start + segment.numel]
                self._rows[segment.bucket][group, segment.offset : segment.offset + segment.numel].copy_(part)

    # ---------------------------------------------------------------- bytes

    def bytes(self) -> int:
        return sum(flat.nbytes for flat in self._flats.values())

    def gathered_bytes(self) -> int:
        return sum(self._pages[bucket].memory.nbytes for bucket in self.gathering.gathered)

    # ---------------------------------------------------------------- private

    def _name(self, bucket: Bucket, number: int) -> str:
        names = [entry.name for entry in bucket.entries]
        between = ", ..., " if len(names) > 2 else ", "
        listed = names[0] if len(names) == 1 else f"{names[0]}{between}{names[-1]}"
        return f"{listed} of model {number}"

    def _home(self, index: int) -> Tensor:
        entry = self._entries[index]
        described, offset = self._layout.entries[entry], self._layout.bucket_offset(entry)
        memory = self._pages[self._bucket(index)].memory
        return described.shaped(memory[offset : offset + described.numel])

    def take_over(self) -> None:
        """Take rank 0's values, and then their memory: one parameter at a time."""
        self.from_leader(self._parameters)
        for index, parameter in enumerate(self._parameters):
            self._put(index, parameter.detach())
            parameter.data = self._homes[index]
            gather_on_use(parameter, self)

    def _bucket(self, index: int) -> int:
        return self._layout.bucket_of(self._entries[index]).index

    def _members(self, bucket: int) -> list[int]:
        """The indices of the parameters in a bucket."""
        return [self._order[entry] for entry in self._layout.buckets[bucket].members]

    def _buckets(self, indices: Iterable[int]) -> list[int]:
        return sorted({self._bucket(index) for index in indices})
