"""Reading a peer's private memory, where the kernel allows it.

It saves the copy into staging chunks and the waiting for each of them: `process_vm_readv` moves a tensor from one
process to another in one copy, about as fast as a copy inside a process. The kernel requires the same user and the
right to trace the other process, which containers and Yama may deny. So every rank tries it when ranks meet, and it is
used only if all of them can read each other.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import sys
import time
from collections.abc import Sequence

from torch import Tensor

from sherd.comm.host.board import Board
from sherd.comm.host.waiting import Waiter
from sherd.errors import CommError

_GIVE_UP_AFTER = 5.0  # seconds for the kernel to tell that a process whose memory is gone has ended
_LOOK_EVERY = 0.001


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_readv = getattr(_libc, "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t

# What peers try to read: a peer that finds this value has reached this very process.
_word = ctypes.c_uint64(secrets.randbits(63) | 1)
MINE = (ctypes.addressof(_word), _word.value)
"""Address and value of a word of this process, for peers to try."""


class RemoteReader:
    """Reads the memory of the ranks of a host, whose processes are `pids`."""

    def __init__(self, pids: Sequence[int], board: Board, waiter: Waiter) -> None:
        self._pids = pids
        self._board = board
        self._waiter = waiter

    def read(self, rank: int, address: int, into: Tensor) -> Tensor:
        """Fill `into`, which is contiguous, from `address` of a rank that is in the same operation."""
        nbytes = into.numel() * into.element_size()
        got = _read(self._pids[rank], address, into.data_ptr(), nbytes)
        # A rank that gave up may have reused its memory while it was read. It says so on the board before that.
        if not self._board.all_well():
            self._waiter.check((rank,))
        if got != nbytes:
            self._explain(rank, ctypes.get_errno() if got < 0 else errno.EFAULT)
        return into

    def _explain(self, rank: int, code: int) -> None:
        """A process that ends loses its memory a moment before it is known to have ended."""
        deadline = time.monotonic() + _GIVE_UP_AFTER
        while code == errno.ESRCH and time.monotonic() < deadline:
            self._waiter.check((rank,))
            time.sleep(_LOOK_EVERY)
        raise CommError(f"cannot read memory of process {self._pids[rank]}: {os.strerror(code)}")


def can_read(pid: int, address: int, value: int) -> bool:
    """Whether this process can read process `pid`, and that is the one with this word."""
    word = ctypes.c_uint64(0)
    return _read(pid, address, ctypes.addressof(word), 8) == 8 and word.value == value


def _read(pid: int, address: int, to: int, nbytes: int) -> int:
    """Bytes read, or -1. The kernel moves at most 2 GB at a time."""
    if _readv is None:
        return -1
    done = 0
    while done < nbytes:
        local, remote = _Vector(to + done, nbytes - done), _Vector(address + done, nbytes - done)
        got: int = _readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if got <= 0:
            return done or -1
        done += got
    return done
