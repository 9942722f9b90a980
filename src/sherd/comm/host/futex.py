"""Sleeping on a word of shared memory, and the fences that flags need.

A flag is an aligned 64-bit word with one writer. The futex is its low half, so a waiter sleeps on a 32-bit word that
changes with the flag. x86-64 keeps stores in order, so data written before a flag is seen before it. ARM does
not: there a fence goes before a flag is raised and after it is seen. FUTEX_WAKE is that fence: the kernel runs a full
barrier before it looks for waiters, and ctypes offers no cheaper one.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import sys
import threading
from typing import Any

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
