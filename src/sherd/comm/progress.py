"""Whatever this thread has under way: while it waits for one thing, it does its part of everything else.

Nobody waits in a circle then, over however many communicators.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

_here = threading.local()


class Moving(Protocol):
    """Something with operations under way."""

    def move_all(self) -> int:
        """Do what can be done without waiting; the number of operations that are left."""


def take_part(moving: Moving) -> None:
    """Have `moving` moved on by this thread's waits, for as long as somebody else holds it."""
    _members().add(moving)


def move_everything() -> int:
    """Move on whatever this thread has under way; the number of operations that are left."""
    return sum(moving.move_all() for moving in list(_members()))


def _members() -> weakref.WeakSet[Moving]:
    """Of this thread: only one thread may use a communicator."""
    if not hasattr(_here, "members"):
        _here.members = weakref.WeakSet()
    members: weakref.WeakSet[Moving] = _here.members
    return members
