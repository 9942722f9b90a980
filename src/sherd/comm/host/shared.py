"""Which tensors lie in memory that other ranks map."""

from __future__ import annotations

import torch
from torch import Tensor

from sherd.comm.host.memory import Segment

Place = tuple[int, int]
"""Number of a segment and byte offset in it. All ranks number the segments alike: allocations are collective."""

STAGED: Place = (-1, 0)
"""Not in shared memory: the contribution goes through staging chunks."""


class SharedMemory:
    """The shared tensors and buffers of a communicator. They stay mapped until it is closed and they are dropped."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._common: list[bool] = []
        self._views: dict[tuple[int, int, int, torch.dtype], Tensor] = {}

    def add(self, segment: Segment, common: bool) -> None:
        """Register a segment; `common` if all ranks use it as one tensor and not as a buffer each."""
        self._segments.append(segment)
        self._common.append(common)

    def find(self, tensor: Tensor) -> Place:
        if self._segments and tensor.device.type == "cpu":
            address = tensor.data_ptr()
            for number, segment in enumerate(self._segments):
                if segment.address <= address < segment.address + segment.nbytes:
                    return number, address - segment.address
        return STAGED

    def is_common(self, tensor: Tensor) -> bool:
        number, _ = self.find(tensor)
        return number >= 0 and self._common[number]

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
        self._common.clear()
        self._views.clear()
