"""Memory that is a bucket's for good, and exists while it is needed.

A bucket of parameters that is gathered on use has its place for good, so that views of it, tied weights and what
autograd saved stay valid. What is behind them exists from `acquire` until `release`.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from sherd.engine.flat import with_own_storage

_PAGE = mmap.PAGESIZE
_MADV_REMOVE = 9
_MADV_POPULATE_WRITE = 23  # not known to kernels before 5.14
_libc = ctypes.CDLL(None, use_errno=True)


class Pages(Protocol):
    """Room for one bucket."""

    memory: Tensor
    """All of it, flat."""

    def acquire(self) -> None:
        """It is about to be written."""

    def release(self) -> None:
        """Give the memory back. What it held is lost."""


class PrivatePages:
    """Memory of this process alone, at one address: pages come with the first write."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        nbytes = numel * dtype.itemsize
        self._map = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A huge page may reach into the memory of the next bucket, which would then be there without being gathered.
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self.memory = torch.frombuffer(self._map, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)

    def acquire(self) -> None:
        _populate(self.memory)

    def release(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)


class SharedPages:
    """A part of memory that the ranks of a host share, at one address on each of them."""

    def __init__(self, memory: Tensor) -> None:
        """`memory` begins with a page, and nothing else is on its last one."""
        self.memory = with_own_storage(memory)

    def acquire(self) -> None:
        _populate(self.memory)

    def release(self) -> None:
        """For all of these ranks."""
        if _advise(self.memory, _MADV_REMOVE):
            raise OSError(ctypes.get_errno(), "madvise(MADV_REMOVE) failed on shared memory")


class DevicePages:
    """Memory of a device, where addresses cannot be kept: the storage that all views have in common is emptied."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.memory = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = self.memory.nbytes

    def acquire(self) -> None:
        self.memory.untyped_storage().resize_(self._nbytes)

    def release(self) -> None:
        self.memory.untyped_storage().resize_(0)


def make_pages(numel: int, dtype: torch.dtype, device: torch.device) -> Pages:
    """Room for a bucket that this process has for itself."""
    return PrivatePages(numel, dtype) if device.type == "cpu" else DevicePages(numel, dtype, device)


def resident_bytes(memory: Tensor) -> int:
    """Bytes of the pages of `memory` that exist."""
    count = round_up(memory.nbytes) // _PAGE
    found = (ctypes.c_ubyte * count)()
    if count and _libc.mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), found):
        raise OSError(ctypes.get_errno(), "mincore failed")
    return sum(page & 1 for page in found) * _PAGE


def _populate(memory: Tensor) -> None:
    """Have all pages at once, which takes less than a fault for each; a kernel that cannot do so makes them later."""
    _advise(memory, _MADV_POPULATE_WRITE)


def _advise(memory: Tensor, advice: int) -> int:
    nbytes = round_up(memory.nbytes)
    return _libc.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(nbytes), advice) if nbytes else 0


def in_pages(sizes: Sequence[int]) -> list[int]:
    """Where parts of these sizes begin, in bytes, if each has pages of its own; last, where all of them end."""
    starts = [0]
    for nbytes in sizes:
        starts.append(starts[-1] + round_up(nbytes))
    return starts


def round_up(nbytes: int) -> int:
    """Bytes of whole pages."""
    return -(-nbytes // _PAGE) * _PAGE
