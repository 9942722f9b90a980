"""Leaving every communicator at once, for a rank whose part is over while its process lives on."""

from __future__ import annotations

import contextlib
import weakref
from typing import Protocol

from sherd.errors import CommError


class Leaves(Protocol):
    """A communicator, as seen from here."""

    closed: bool

    def close(self, error: BaseException | None = None) -> None: ...


_open: weakref.WeakSet[Leaves] = weakref.WeakSet()
note = _open.add


def leave_all(error: BaseException | None = None) -> None:
    """Close what is open, so that ranks that still need this one hear that it has left, and why."""
    for communicator in list(_open):
        if not communicator.closed:
            with contextlib.suppress(CommError):  # of others, which nobody here waits for any more
                communicator.close(error)
