"""Calls that block inside the backend, on threads of their own, so that the rank can watch its peers meanwhile."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")

AT_EXIT = 1.0  # seconds
_in_the_backend: set[threading.Event] = set()
"""Each is set once its thread has returned from there."""


class SideThread(Generic[T]):
    """Work that blocks inside the backend, on a thread of its own, which is abandoned if the work cannot succeed."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._made: list[T] = []
        self._error: BaseException | None = None
        self._over = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def attempt(self, seconds: float) -> bool:
        """Whether the work is done, after at most `seconds`. Raises what it raised."""
        over = self._over.wait(seconds)
        if over and self._error is not None:
            raise self._error
        return over

    def result(self) -> T:
        """What the work returned."""
        return self._made.pop()

    def _run(self) -> None:
        with inside_the_backend(self._over):
            try:
                self._made.append(self._work())
            except BaseException as error:  # for the rank that waits
                self._error = error


@contextmanager
def inside_the_backend(over: threading.Event) -> Iterator[None]:
    """To be held by a thread while it is in the backend; sets `over` afterwards."""
    _in_the_backend.add(over)
    yield
    _in_the_backend.discard(over)
    over.set()


@atexit.register
def _let_them_return() -> None:
    """A thread that returns from the backend after the interpreter is gone aborts the process. After a fault, the other
    ranks are about to end as well, and so is what the thread waits for."""
    deadline = time.monotonic() + AT_EXIT
    for over in list(_in_the_backend):
        over.wait(max(deadline - time.monotonic(), 0))
