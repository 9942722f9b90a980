"""Whatever this thread has under way: while it waits for one thing, it does its part of everything else.

Nobody waits in a circle then, over however many communicators. Threads that take turns at one each take part.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

_here = threading.local()


class Moving(Protocol):
    """Something with operations under way, and the `lock` of its communicator: who has it may move them."""

    lock: threading.RLock

    def move_all(self) -> int:
        """Do what can be done without waiting; the number of operations that are left."""


def take_part(moving: Moving) -> None:
    """Have `moving` moved on by this thread's waits, for as long as somebody else holds it."""
    _members().add(moving)


def move_everything() -> int:
    """Move on whatever this thread has under way; the number of operations that are left."""
    left = 0
    for moving in list(_members()):
        if moving.lock.acquire(blocking=False):  # else another thread is at it
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
