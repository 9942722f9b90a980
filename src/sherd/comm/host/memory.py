"""Segments: anonymous memory that the ranks of a host map together.

A segment is a memfd: it has no name on disk, is not bounded by the size of /dev/shm, and the kernel frees it when the
last process that maps it is gone, however that process ended.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Protocol

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class Keeper(Protocol):
    """Creates the segments of a host. Who holds the keeper can outlive the ranks that use its segments."""

    def create(self, label: str, nbytes: int) -> int:
        """A file descriptor for `nbytes` of zeroed shared memory; the caller owns it."""


class MemfdKeeper:
    """Keeps segments only as long as a rank maps them."""

    def create(self, label: str, nbytes: int) -> int:
        fd = os.memfd_create(f"sherd-{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, max(round_up(nbytes, PAGE), PAGE))
            # Nobody can shrink it under a peer, which would be a SIGBUS there.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError:
            os.close(fd)
            raise
        return fd


class Segment:
    """One mapping of a segment. Tensors made from it keep it mapped; it is unmapped with the last of them."""

    def __init__(self, fd: int) -> None:
        """Map all of `fd`, which may be closed afterwards."""
        self.memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self.nbytes = len(self.memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.fd = -1
        """What it is mapped from, where that is kept: to be mapped once more in another way."""

    def keep(self, fd: int) -> None:
        """Keep a duplicate of `fd` for as long as this object lives."""
        self.fd = os.dup(fd)
        weakref.finalize(self, os.close, self.fd)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype, owner: memoryview | None = None) -> Tensor:
        """A flat view of `numel` elements from byte `offset`. It holds `owner`, a view of all of the memory, which is
        gone when all tensors made with it are."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        memory = self.memory if owner is None else owner
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)

    def words(self) -> memoryview:
        """The segment as 64-bit words."""
        return memoryview(self.memory).cast("Q")
