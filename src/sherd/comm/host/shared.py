"""Which tensors lie in memory that other ranks map."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from sherd.comm.base import Backing
from sherd.comm.host.memory import Segment

Place = tuple[int, int]
"""Number of a segment and byte offset in it. All ranks number the segments alike: allocations are collective."""

STAGED: Place = (-1, 0)
"""Not in shared memory: the contribution goes through staging chunks."""

PRIVATE = 1 << 40
"""Instead of the number of a segment: the offset is an address in the memory of the rank itself."""


class SharedMemory:
    """The shared tensors and buffers of a communicator. They stay mapped until it is closed and they are dropped, or
    every rank has dropped them before."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}  # by number
        self._owners: dict[int, weakref.ref[memoryview]] = {}
        self._starts: list[int] = []  # their addresses, ascending
        self._by_address: list[int] = []  # their numbers in that order
        self._common: list[bool] = []  # by number, of those that are gone too
        self._views: dict[tuple[int, int, int, torch.dtype], Tensor] = {}

    def add(self, segment: Segment, common: bool, owner: memoryview | None = None) -> None:
        """Register a segment; `common` if all ranks use it as one tensor and not as a buffer each. The tensors that
        this rank has of it hold its `owner`, if they may be dropped."""
        at = bisect.bisect(self._starts, segment.address)
        number = len(self._common)
        self._starts.insert(at, segment.address)
        self._by_address.insert(at, number)
        self._segments[number] = segment
        self._common.append(common)
        if owner is not None:
            self._owners[number] = weakref.ref(owner)

    def in_use(self) -> list[bool]:
        """Of those that are there and may be dropped, whether this rank still has tensors. The same ones on all ranks,
        as these agree on what they `keep`."""
        return [owner() is not None for owner in self._owners.values()]

    def keep(self, used: Sequence[bool]) -> None:
        """Let go of what no rank has tensors of. An operation that is under way holds its own."""
        for number in [number for number, kept in zip(self._owners, used, strict=True) if not kept]:
            del self._owners[number]
            segment = self._segments.pop(number)
            at = self._by_address.index(number)
            assert self._starts[at] == segment.address
            del self._by_address[at], self._starts[at]
            self._views = {key: view for key, view in self._views.items() if key[0] != number}

    def find(self, tensor: Tensor) -> Place:
        if self._segments and tensor.is_cpu:
            address = tensor.data_ptr()
            number = bisect.bisect_right(self._starts, address) - 1
            if number >= 0:
                segment = self._by_address[number]
                offset = address - self._segments[segment].address
                if offset < self._segments[segment].nbytes:
                    return segment, offset
        return STAGED

    def is_common(self, tensor: Tensor) -> bool:
        number, _ = self.find(tensor)
        return number >= 0 and self._common[number]

    def backing(self, tensor: Tensor) -> Backing | None:
        """The file that a shared tensor is mapped from."""
        number, offset = self.find(tensor)
        return Backing(self._segments[number].fd, offset) if number >= 0 and self._common[number] else None

    def view(self, place: Place, numel: int, dtype: torch.dtype) -> Tensor:
        key = (*place, numel, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) > 4096:
                self._views.clear()
            view = self._views[key] = self._segments[place[0]].tensor(place[1], numel, dtype)
        return view

    def forget(self) -> None:
        self._segments.clear()
        self._owners.clear()
        self._starts.clear()
        self._by_address.clear()
        self._common.clear()
        self._views.clear()
