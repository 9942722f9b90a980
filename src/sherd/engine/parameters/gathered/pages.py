"""Memory for a bucket: its address is fixed, its contents exist while they are needed.

A bucket that is gathered on use has a fixed address, so that views, tied weights and tensors that autograd saved stay
valid. The memory behind it exists from `acquire` until `release`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import Protocol

import torch
from torch import Tensor

from sherd.comm import Backing
from sherd.comm.host.memory import PAGE, round_up
from sherd.engine.parameters import page_map

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # unknown to kernels before 5.14
_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
if sys.platform == "linux":  # ranks share memory only there
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class Pages(Protocol):
    """Memory for one bucket."""

    memory: Tensor
    """All of it, flat, as this rank's parameters see it."""
    target: Tensor
    """The same memory for gathering, where that must be told apart from the rank's own writes into `memory`."""

    def acquire(self) -> None:
        """Prepare the memory to be written."""

    def release(self) -> None:
        """Give the memory back. Its contents are lost."""

    def written(self) -> bool:
        """Whether the rank has written into `memory` since it was acquired, as far as can be detected."""


class _Reserved:
    """A fixed range of addresses at which files can be mapped."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.nbytes = max(round_up(numel * dtype.itemsize, PAGE), PAGE)
        self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A huge page may reach into the memory of the next bucket, which would then exist without being gathered.
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self.memory = torch.frombuffer(self._map, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def show(self, backing: Backing | None, flags: int) -> None:
        """Map a file here, or zeros; the previous mapping is lost."""
        fd, offset = backing or (-1, 0)
        flags |= _MAP_FIXED | (0 if backing else mmap.MAP_ANONYMOUS)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if _libc.mmap(self.address, self.nbytes, protection, flags, fd, offset) != self.address:
            raise OSError(ctypes.get_errno(), "mmap failed")

    def advise(self, advice: int) -> None:
        self._map.madvise(advice)


class AnonymousPages:
    """Private memory of this process, whose pages are created by the first write. Writes cannot be detected."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._reserved = _Reserved(numel, dtype)
        self.memory = self.target = self._reserved.memory

    def acquire(self) -> None:
        _populate(self.memory, _MADV_POPULATE_WRITE)

    def release(self) -> None:
        self._reserved.advise(mmap.MADV_DONTNEED)

    def written(self) -> bool:
        return False


class PrivatePages:
    """Private memory of this process, mapped twice: pages that are written through `memory` become copies."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._seen, self._filled = _Reserved(numel, dtype), _Reserved(numel, dtype)
        fd = os.memfd_create("sherd-pages", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, self._seen.nbytes)
            self._filled.show(Backing(fd, 0), mmap.MAP_SHARED)
            self._seen.show(Backing(fd, 0), mmap.MAP_PRIVATE)
        finally:
            os.close(fd)  # the mappings keep the file
        self.memory, self.target = self._seen.memory, self._filled.memory

    def acquire(self) -> None:
        _populate(self.target, _MADV_POPULATE_WRITE)
        _populate(self.memory, _MADV_POPULATE_READ)

    def release(self) -> None:
        self._seen.advise(mmap.MADV_DONTNEED)
        self._filled.advise(mmap.MADV_REMOVE)

    def written(self) -> bool:
        return bool(page_map.written(self._seen.address, self._seen.nbytes))


class AliasPages:
    """Addresses at which memory that ranks share can be mapped. What this rank writes there stays private."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._reserved = _Reserved(numel, dtype)
        self.memory = self.target = self._reserved.memory
        self.nbytes = self._reserved.nbytes

    def show(self, backing: Backing, target: Tensor) -> None:
        """Map the shared memory of `target` here; it is page-aligned and of the same size."""
        self._reserved.show(backing, mmap.MAP_PRIVATE)
        self.target = target
        _populate(self.memory, _MADV_POPULATE_READ)

    def acquire(self) -> None:
        return

    def release(self) -> None:
        """Map zeros here. The shared memory itself stays."""
        self._reserved.show(None, mmap.MAP_PRIVATE)
        self.target = self.memory

    def written(self) -> bool:
        if self.target is self.memory or not page_map.can_tell():
            return False
        return bool(page_map.written(self._reserved.address, self.nbytes))


class DevicePages:
    """Memory of a device, where addresses cannot be kept: the storage that all views share is emptied."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.memory = self.target = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = self.memory.nbytes

    def acquire(self) -> None:
        self.memory.untyped_storage().resize_(self._nbytes)

    def release(self) -> None:
        self.memory.untyped_storage().resize_(0)

    def written(self) -> bool:
        return False


def make_pages(numel: int, dtype: torch.dtype, device: torch.device) -> Pages:
    """Memory for a bucket that only this process uses."""
    if device.type != "cpu":
        return DevicePages(numel, dtype, device)
    return PrivatePages(numel, dtype) if page_map.can_tell() else AnonymousPages(numel, dtype)


def resident_bytes(memory: Tensor) -> int:
    """Bytes of the pages of `memory` that exist."""
    count = round_up(memory.nbytes, PAGE) // PAGE
    found = (ctypes.c_ubyte * count)()
    if count and _libc.mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), found):
        raise OSError(ctypes.get_errno(), "mincore failed")
    return sum(page & 1 for page in found) * PAGE


def _populate(memory: Tensor, advice: int) -> None:
    """Create all pages at once, which is faster than one fault each; a kernel that cannot creates them on use."""
    if memory.numel():
        _libc.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(round_up(memory.nbytes, PAGE)), advice)
