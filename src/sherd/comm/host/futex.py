"""Sleeping on a word of shared memory, and the fences that flags need.

A flag is an aligned 64-bit word with one writer. The futex is its low half, so a waiter sleeps on a 32-bit word that
changes with the flag. x86-64 keeps stores in order, so data written before a flag is seen before it. ARM does
not: there a fence goes before a flag is raised and after it is seen. FUTEX_WAKE is that fence: the kernel runs a full
barrier before it looks for waiters, and ctypes offers no cheaper one.

`Sleepers` sleep until other ranks are far enough. A rank that sleeps says which flags it needs and how far, and sleeps
on a word of its own, its *bell*. Whoever raises the last of these flags rings it: a rank wakes once, when everything it
needs is there, however many it waited for.

No wake-up is missed. A rank says what it needs before it looks a last time, and another raises its flag before it looks
who sleeps. With a full barrier between the two steps on either side, at least one of them sees the other; so do two
ranks that raise the last two flags at once.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import sys
import threading
from collections.abc import Sequence
from typing import Any

from sherd.comm.host.memory import SharedBlock

_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_ALL = 0x7FFFFFFF
_SYSCALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())

#: Whether stores to memory become visible in program order, so that flags need no fence.
STORES_IN_ORDER = platform.machine() == "x86_64"


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_syscall: Any = _libc.syscall if _libc is not None else None
if _syscall is not None:
    _pointer, _int = ctypes.c_void_p, ctypes.c_int
    _syscall.argtypes = (ctypes.c_long, _pointer, _int, ctypes.c_uint32, _pointer, _pointer, _int)
_NUMBER = _SYSCALL or -1
_fence_word = ctypes.c_uint32(0)


@functools.lru_cache(16)
def _timeout(seconds: float) -> _Timespec:
    whole = int(seconds)
    return _Timespec(whole, int((seconds - whole) * 1e9))


def available() -> bool:
    return _SYSCALL is not None and sys.byteorder == "little" and _libc is not None


def wait(address: int, expected: int, seconds: float) -> None:
    """Sleep while the word at `address` is `expected`, until a wake, a signal or the timeout. Releases the GIL."""
    limit = ctypes.byref(_timeout(seconds))
    if _syscall(_NUMBER, address, _FUTEX_WAIT, expected & 0xFFFFFFFF, limit, None, 0) == -1:
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(code, f"futex wait: {os.strerror(code)}")


def wake(address: int) -> None:
    """Wake all that sleep on the word at `address`."""
    _syscall(_NUMBER, address, _FUTEX_WAKE, _ALL, None, None, 0)


def fence() -> None:
    """A full memory barrier, where the architecture needs one to keep stores in order."""
    if not STORES_IN_ORDER:
        wake(ctypes.addressof(_fence_word))


class _Fence:
    def __enter__(self) -> None:
        fence()

    def __exit__(self, *error: object) -> None:
        pass


barrier: threading.Lock | _Fence = threading.Lock() if STORES_IN_ORDER else _Fence()
"""`with barrier: pass` is a full memory barrier: what was stored before is visible to others before anything after it
is read. To take a lock is an atomic instruction, which on x86-64 is such a barrier, for a tenth of a system call."""

BED_BYTES = 64
"""Of each rank: its bell, the value that it needs, and the first of the flags that must reach it."""


class Sleepers:
    """One rank's view of who sleeps. `posted` and `done` are the flags of all ranks; all others have one reader."""

    def __init__(self, block: SharedBlock, start: int, rank: int, posted: Sequence[int], done: Sequence[int]) -> None:
        world = len(posted)
        self._words = block.words()
        self._address = block.address
        self._rank = rank
        self._others = [r for r in range(world) if r != rank]
        self._sets = {index: flags for flags in (posted, done) for index in flags}
        self._beds = [(start + BED_BYTES * r) // 8 for r in range(world)]
        asleep = start + BED_BYTES * world
        self.asleep = memoryview(block.memory)[asleep : asleep + world]

    @staticmethod
    def nbytes(world: int) -> int:
        return (BED_BYTES + 8) * world

    def sleep(self, indices: Sequence[int], target: int, seconds: float) -> None:
        """Sleep until every flag in `indices`, all of one set, has reached `target`, for at most `seconds`."""
        words, bed = self._words, self._beds[self._rank]
        words[bed + 1], words[bed + 2] = target, indices[0]
        bell = words[bed]
        if not STORES_IN_ORDER:
            fence()
        self.asleep[self._rank] = 1
        try:
            with barrier:
                pass
            for index in indices:
                if words[index] < target:
                    wait(self._address + 8 * bed, bell, seconds)
                    break
        finally:
            self.asleep[self._rank] = 0

    def wake(self, index: int, value: int) -> None:
        """This rank has raised its flag at `index` to `value`, then a barrier: wake those that need nothing more."""
        words, asleep = self._words, self.asleep
        for rank in self._others:
            bed = self._beds[rank]
            if not asleep[rank] or value < (target := words[bed + 1]):
                continue
            first = words[bed + 2]
            flags = self._sets.get(first)
            if flags is None:
                needed = first == index
            else:
                needed = index in flags and all(words[flags[r]] >= target for r in self._others if r != rank)
            if needed:
                words[bed] += 1
                wake(self._address + 8 * bed)
