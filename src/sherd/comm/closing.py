"""Closing communicators: what stands in for the parts of a closed one, and closing all of them at once."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from sherd.errors import CommClosed, CommError

CLOSED_MEANWHILE = (
    "this communicator was closed during this call, by another thread or because nothing referred to it any more; keep "
    "it in a variable until its calls are complete"
)


def unusable(why: str) -> CommClosed:
    """For any call on a communicator that was closed or has failed."""
    return CommClosed(f"this communicator can no longer be used: {why}")


class _Closed:
    """Raises for whatever it is asked, and holds nothing."""

    def __getattr__(self, name: str) -> Any:
        raise unusable("it was closed")


CLOSED: Any = _Closed()


_open: weakref.WeakSet[Any] = weakref.WeakSet()  # communicators


def opened(communicator: Any) -> None:
    """The last line of a constructor: one that failed before it has nothing to close."""
    _open.add(communicator)


def leave_all(error: BaseException | None = None) -> None:
    """Close every open communicator of this process, so that ranks that still need this one learn that it left, and
    why: for a rank that is finished while its process lives on."""
    for communicator in list(_open):
        if not communicator.closed:
            with contextlib.suppress(CommError):  # about other ranks, which nobody here waits for any more
                communicator.close(error)
