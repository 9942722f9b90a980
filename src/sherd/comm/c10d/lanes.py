"""Sends and receives over a process group.

The backend moves a large message only while both ends wait for it, and knows a finished one only by waiting. So each
direction to each peer is a *lane* with a thread of its own: its messages go through in order, and two ranks may send to
each other before either receives.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from sherd.comm.handle import Handle

AT_EXIT = 1.0  # seconds


class Waitable(Protocol):
    """A piece of the backend's work."""

    def wait(self) -> object: ...


class Message(Handle):
    """A send or receive on its lane. `watch` waits for it with an eye on the peers."""

    __slots__ = ("_finished", "_first", "_steps", "_watch", "error", "over")

    def __init__(
        self, steps: Iterator[Waitable], watch: Callable[[Callable[[float], bool]], None], finished: Callable[[], None]
    ) -> None:
        self._steps = steps
        self._watch = watch
        self._finished = finished
        self.over = threading.Event()
        self._first: Waitable | None = None
        self.error: BaseException | None = None
        self.result = None

    def start(self) -> None:
        """Go as far as there is nothing to wait for, before the message is put on its lane."""
        with self._failing():
            self._first = next(self._steps, None)

    def run(self) -> None:
        """The rest of it, on the lane's thread, which then has to say that it is `over`."""
        with self._failing():
            if self._first is not None:
                self._first.wait()
            for work in self._steps:
                work.wait()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Whatever it is, it belongs to the rank that waits."""
        try:
            yield
        except BaseException as error:
            self.error = error

    def wait(self) -> Tensor:
        self._watch(self._attempt)
        self._finished()
        assert self.result is not None
        return self.result

    def done(self) -> bool:
        return self.over.is_set()

    def _attempt(self, seconds: float) -> bool:
        over = self.over.wait(seconds)
        if over and self.error is not None:
            raise self.error
        return over


class Lane:
    """Messages in one direction between this rank and a peer."""

    def __init__(self, name: str) -> None:
        messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.add = messages.put
        self.close = weakref.finalize(self, messages.put, None)
        # A daemon: a message that never comes must not keep a process from ending.
        threading.Thread(target=_run, args=(messages,), name=name, daemon=True).start()


_in_the_backend: set[threading.Event] = set()


def _run(messages: queue.SimpleQueue[Message | None]) -> None:
    while (message := messages.get()) is not None:
        over = message.over
        _in_the_backend.add(over)
        message.run()
        _in_the_backend.discard(over)
        del message  # first: once its rank hears of it, nobody but that holds what it holds
        over.set()


@atexit.register
def _let_them_come_back() -> None:
    """A thread that comes back from the backend when the interpreter has gone aborts the process. After a fault, the
    other ranks are about to end as well, and with them what it waits for."""
    deadline = time.monotonic() + AT_EXIT
    for over in list(_in_the_backend):
        over.wait(max(deadline - time.monotonic(), 0))
