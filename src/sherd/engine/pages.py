"""Memory that is a bucket's for good, and exists while it is needed.

A bucket of parameters that is gathered on use has its place for good, so that views of it, tied weights and what
autograd saved stay valid. What is behind them exists from `acquire` until `release`.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Protocol

import torch
from torch import Tensor

from sherd.comm.host.memory import PAGE, round_up

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # not known to kernels before 5.14
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MAP_FIXED = 1, 2, 0x10
_libc = ctypes.CDLL(None, use_errno=True)
if sys.platform == "linux":  # elsewhere no ranks share memory
    _libc.mremap.restype = _libc.mmap.restype = ctypes.c_void_p
    _libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


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
        _populate(self.memory, _MADV_POPULATE_WRITE)

    def release(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)


class AliasPages:
    """An address at which memory that ranks share can appear: a second way to it, which comes and goes."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.nbytes = max(round_up(numel * dtype.itemsize, PAGE), PAGE)
        self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = torch.frombuffer(self._map, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def show(self, memory: Tensor) -> None:
        """Have `memory`, which begins with a page of shared memory and is as large, appear here."""
        # Of a shared mapping, the part that begins there is mapped once more if it is said to have no length.
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
        if _libc.mremap(memory.data_ptr(), 0, self.nbytes, flags, self._address) != self._address:
            raise OSError(ctypes.get_errno(), "mremap of shared memory failed")
        _populate(self.memory, _MADV_POPULATE_READ)

    def acquire(self) -> None:
        return

    def release(self) -> None:
        """Here are zeros from now on. The memory itself stays."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if _libc.mmap(self._address, self.nbytes, protection, flags, -1, 0) != self._address:
            raise OSError(ctypes.get_errno(), "mmap failed")


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
    count = round_up(memory.nbytes, PAGE) // PAGE
    found = (ctypes.c_ubyte * count)()
    if count and _libc.mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), found):
        raise OSError(ctypes.get_errno(), "mincore failed")
    return sum(page & 1 for page in found) * PAGE


def _populate(memory: Tensor, advice: int) -> None:
    """Have all pages at once, which takes less than a fault for each; a kernel that cannot do so makes them later."""
    if memory.numel():
        _libc.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(round_up(memory.nbytes, PAGE)), advice)
