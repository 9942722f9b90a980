"""Memory whose address stays while its pages come and go.

A bucket of parameters that is gathered on use has its place for good, so that views of it, tied weights and what
autograd saved stay valid. What is behind the addresses exists from the first write until `release`.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Protocol

import torch
from torch import Tensor


class Pages(Protocol):
    """Room for one bucket."""

    memory: Tensor
    """All of it, flat."""

    def release(self) -> None:
        """Give the pages back: it reads as zeros until it is written again."""


class PrivatePages:
    """Memory of this process alone."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        nbytes = numel * dtype.itemsize
        self._map = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A huge page may reach into the memory of the next bucket, which would then be there without being gathered.
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self.memory = torch.frombuffer(self._map, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)

    def release(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)

    def resident_bytes(self) -> int:
        """Bytes of the pages that exist."""
        count = -(-len(self._map) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * count)()
        address = ctypes.c_void_p(self.memory.data_ptr())
        if self.memory.numel() and ctypes.CDLL(None, use_errno=True).mincore(address, len(self._map), found):
            raise OSError(ctypes.get_errno(), "mincore failed")
        return sum(page & 1 for page in found) * mmap.PAGESIZE
