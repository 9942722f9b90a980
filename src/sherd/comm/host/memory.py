"""Blocks of memory that the ranks of a host share, and which tensors lie in them.

A block is a memfd: it has no name on disk, is not limited by the size of /dev/shm, and the kernel frees it when the
last process that maps it is gone, however that ended.
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from sherd.comm.base import Backing
from sherd.comm.memo import Memo

PAGE = mmap.PAGESIZE


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def new_memory(label: str, nbytes: int) -> int:
    """A file descriptor for `nbytes` of zeroed shared memory; the caller owns it."""
    fd = os.memfd_create(f"sherd-{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, max(round_up(nbytes, PAGE), PAGE))
        # No rank can shrink it, which would be a SIGBUS in another.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


class SharedBlock:
    """One mapping of shared memory. Tensors made from it keep it mapped; it is unmapped with the last of them."""

    def __init__(self, fd: int) -> None:
        """Map all of `fd`, which may be closed afterwards."""
        self.memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self.nbytes = len(self.memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.fd = -1
        """The file it is mapped from, where that is kept, so that it can be mapped again."""

    def keep(self, fd: int) -> None:
        """Keep a duplicate of `fd` for as long as this object lives."""
        self.fd = os.dup(fd)
        weakref.finalize(self, os.close, self.fd)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype, owner: memoryview | None = None) -> Tensor:
        """A flat view of `numel` elements from byte `offset`. It keeps `owner` alive, a view of all the memory, which
        is freed with the last tensor made with it."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        memory = self.memory if owner is None else owner
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)

    def words(self) -> memoryview:
        """The block as 64-bit words."""
        return memoryview(self.memory).cast("Q")


Location = tuple[int, int]
"""Number of a block and byte offset in it. All ranks number the blocks the same: allocations are collective."""

STAGED: Location = (-1, 0)
"""Not in shared memory: the contribution goes through staging chunks."""

PRIVATE = 1 << 40
"""Instead of the number of a block: the offset is an address in the rank's own memory."""


class SharedMemory:
    """The shared tensors and buffers of a communicator. They stay mapped until it is closed and they are dropped, or
    until every rank has dropped them."""

    def __init__(self) -> None:
        self._blocks: dict[int, SharedBlock] = {}  # by number
        self._owners: dict[int, weakref.ref[memoryview]] = {}
        self._starts: list[int] = []  # their addresses, ascending
        self._by_address: list[int] = []  # their numbers in that order
        self._common: list[bool] = []  # by number, including those that are gone
        self._views = Memo[tuple[int, int, int, torch.dtype], Tensor]()

    def add(self, block: SharedBlock, common: bool, owner: memoryview | None = None) -> None:
        """Register a block; `common` if all ranks use it as one tensor, not as a buffer each. This rank's tensors in it
        keep its `owner` alive, if they may be dropped."""
        at = bisect.bisect(self._starts, block.address)
        number = len(self._common)
        self._starts.insert(at, block.address)
        self._by_address.insert(at, number)
        self._blocks[number] = block
        self._common.append(common)
        if owner is not None:
            self._owners[number] = weakref.ref(owner)

    def in_use(self) -> list[bool]:
        """For each block that may be dropped, whether this rank still has tensors in it. The same blocks on all ranks,
        as they agree on what they `keep`."""
        return [owner() is not None for owner in self._owners.values()]

    def keep(self, used: Sequence[bool]) -> None:
        """Release the blocks in which no rank has tensors. An operation under way keeps its own alive."""
        for number in [number for number, kept in zip(self._owners, used, strict=True) if not kept]:
            del self._owners[number]
            block = self._blocks.pop(number)
            at = self._by_address.index(number)
            assert self._starts[at] == block.address
            del self._by_address[at], self._starts[at]
            for key in [key for key in self._views if key[0] == number]:
                del self._views[key]

    def find(self, tensor: Tensor) -> Location:
        if self._blocks and tensor.is_cpu:
            address = tensor.data_ptr()
            number = bisect.bisect_right(self._starts, address) - 1
            if number >= 0:
                block = self._by_address[number]
                offset = address - self._blocks[block].address
                if offset < self._blocks[block].nbytes:
                    return block, offset
        return STAGED

    def find_common(self, tensor: Tensor) -> Location | None:
        """Where a tensor lies that all ranks use as one; None for any other."""
        place = self.find(tensor)
        return place if place[0] >= 0 and self._common[place[0]] else None

    def backing(self, tensor: Tensor) -> Backing | None:
        """The file that a shared tensor is mapped from."""
        place = self.find_common(tensor)
        return None if place is None else Backing(self._blocks[place[0]].fd, place[1])

    def view(self, place: Location, numel: int, dtype: torch.dtype) -> Tensor:
        key = (*place, numel, dtype)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._blocks[place[0]].tensor(place[1], numel, dtype)
        return view

    def forget(self) -> None:
        for each in (self._blocks, self._owners, self._starts, self._by_address, self._common, self._views):
            each.clear()
