"""Whatever this thread has under way: while it waits for one operation, it does its part of all the others.

So ranks do not deadlock, over however many communicators. Threads that share a communicator each do this.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol


class Moving(Protocol):
    """Something with operations under way, and the `lock` of its communicator: its holder may move them."""

    lock: threading.RLock

    def move_all(self) -> int:
        """Do what can be done without waiting; how much is left that may move on independently of the rest."""


class _Here(threading.local):
    """What this thread uses."""

    def __init__(self) -> None:
        self.members: list[weakref.ref[Moving]] = []  # not a WeakSet, which costs more to go through than to move


_here = _Here()


def take_part(moving: Moving) -> None:
    """Have this thread's waits move `moving` on, for as long as something else refers to it."""
    if all(member() is not moving for member in _here.members):
        _here.members = [*(member for member in _here.members if member() is not None), weakref.ref(moving)]


def move_everything() -> int:
    """Move on whatever this thread has under way; how much is left that may move on independently of the rest."""
    left = 0
    for member in _here.members:
        moving = member()
        if moving is not None and moving.lock.acquire(blocking=False):  # else another thread is moving it
            try:
                left += moving.move_all()
            finally:
                moving.lock.release()
    return left
