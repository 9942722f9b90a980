"""Whatever this thread has under way: while it waits for one operation, it does its part of all the others.

So ranks do not deadlock, over however many communicators. Threads that share a communicator each do this.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

_here = threading.local()


class Moving(Protocol):
    """Something with operations under way, and the `lock` of its communicator: its holder may move them."""

    lock: threading.RLock

    def move_all(self) -> int:
        """Do what can be done without waiting; the number of operations that are left."""


def take_part(moving: Moving) -> None:
    """Have this thread's waits move `moving` on, for as long as something else refers to it."""
    _members().add(moving)


def move_everything() -> int:
    """Move on whatever this thread has under way; the number of operations that are left."""
    left = 0
    for moving in list(_members()):
        if moving.lock.acquire(blocking=False):  # else another thread is moving it
            try:
                left += moving.move_all()
            finally:
                moving.lock.release()
    return left


def _members() -> weakref.WeakSet[Moving]:
    """Those that this thread uses."""
    if not hasattr(_here, "members"):
        _here.members = weakref.WeakSet()
    members: weakref.WeakSet[Moving] = _here.members
    return members
