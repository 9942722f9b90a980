"""A rank's private view of memory that ranks share: it reads what the others wrote, and what it writes stays private.

The view is a private mapping of the same file. A page that this rank writes becomes a private copy, which does not see
what others write until it is given back.
"""

from __future__ import annotations

import ctypes
import mmap
from itertools import pairwise

import torch
from torch import Tensor

from sherd.comm import Backing
from sherd.comm.host.memory import PAGE, round_up
from sherd.engine.parameters import page_map
from sherd.engine.parameters.page_map import Runs


class CopyOnWrite:
    """This rank's view of `shared`, a flat tensor mapped from `backing`. `memory` has the same size."""

    def __init__(self, shared: Tensor, backing: Backing) -> None:
        self._shared = shared.view(torch.uint8)
        self._nbytes = round_up(max(shared.nbytes, 1), PAGE)
        self._map = mmap.mmap(backing.fd, self._nbytes, flags=mmap.MAP_PRIVATE, offset=backing.offset)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        empty = not shared.numel()
        self.memory = shared if empty else torch.frombuffer(self._map, dtype=shared.dtype, count=shared.numel())
        self._own = self.memory.view(torch.uint8)

    def written(self) -> Runs:
        """The pages that this rank has written. Only where the page map can tell."""
        return page_map.written(self._address, self._nbytes)

    def give_back(self, pages: Runs) -> Runs:
        """Give back those of these pages that equal the shared ones; return the others."""
        kept: Runs = []
        for start, stop in pages:
            different = self._different(start, stop)
            for (_, last), (first, _) in pairwise([(start, start), *different, (stop, stop)]):
                self.drop(last, first)
            kept += different
        return kept

    def pages_of(self, part: Tensor) -> tuple[int, int]:
        """The pages that a part of `memory` covers."""
        offset = part.data_ptr() - self._address
        return offset // PAGE, -(-(offset + part.nbytes) // PAGE)

    def _different(self, start: int, stop: int) -> Runs:
        """The pages in `[start, stop)` that differ from the shared ones."""
        low, high = start * PAGE, min(stop * PAGE, self._own.numel())
        own, shared = (each[low:high].view(torch.int64) for each in (self._own, self._shared))
        if torch.equal(own, shared):
            return []
        elements = (own != shared).nonzero().flatten() // (PAGE // 8)
        return page_map.runs_of(start + page for page in torch.unique_consecutive(elements).tolist())

    def drop(self, start: int, stop: int) -> None:
        """Give back pages `[start, stop)`, whatever they hold."""
        if start < stop:
            self._map.madvise(mmap.MADV_DONTNEED, start * PAGE, (stop - start) * PAGE)
