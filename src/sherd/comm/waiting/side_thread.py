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
    """Work that waits in the backend, where nobody would notice that it is in vain: on a thread of its own, which is
    left behind then."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._made: list[T] = []
        self._error: BaseException | None = None
        self._over = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def attempt(self, seconds: float) -> bool:
        """Whether it is done, after at most some seconds. Raises what it raised."""
        over = self._over.wait(seconds)
        if over and self._error is not None:
            raise self._error
        return over

    def result(self) -> T:
        """What it gave."""
        return self._made.pop()

    def _run(self) -> None:
        with inside_the_backend(self._over):
            try:
                self._made.append(self._work())
            except BaseException as error:  # it belongs to the rank
                self._error = error


@contextmanager
def inside_the_backend(over: threading.Event) -> Iterator[None]:
    """For a thread that nobody waits for, while it is in the backend; then it is `over`."""
    _in_the_backend.add(over)
    yield
    _in_the_backend.discard(over)
    over.set()


@atexit.register
def _let_them_come_back() -> None:
    """A thread that comes back from the backend when the interpreter has gone aborts the process. After a fault, the
    other ranks are about to end as well, and with them what it waits for."""
    deadline = time.monotonic() + AT_EXIT
    for over in list(_in_the_backend):
        over.wait(max(deadline - time.monotonic(), 0))
