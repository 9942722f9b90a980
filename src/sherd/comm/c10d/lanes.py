"""Sends and receives over a process group.

The backend moves a large message only while both ends wait for it, and knows a finished one only by waiting. So each
direction to each peer is a *lane* with a thread of its own: its messages go through in order, and two ranks may send to
each other before either receives.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from sherd.comm.handle import Handle
from sherd.comm.waiting.side_thread import inside_the_backend
from sherd.errors import CommClosed


class Waitable(Protocol):
    """A piece of the backend's work."""

    def wait(self) -> object: ...


class LaneOperation(Handle):
    """A send or receive on its lane. `watch` waits for it with an eye on the peers."""

    __slots__ = ("_failure", "_finished", "_first", "_steps", "_watch", "error", "over")

    def __init__(
        self, steps: Iterator[Waitable], watch: Callable[[Callable[[float], bool]], None], finished: Callable[[], None]
    ) -> None:
        self._steps = steps
        self._watch = watch
        self._finished = finished
        self.over = threading.Event()
        self._first: Waitable | None = None
        self.error: BaseException | None = None
        self._failure: str | None = None  # what it said, once somebody was told
        self.result = None

    def start(self) -> None:
        """Go as far as there is nothing to wait for, before the message is put on its lane."""
        with self._failing():
            self._first = next(self._steps, None)

    def run(self) -> None:
        """The rest of it, on the lane's thread, which then has to say that it is `over`."""
        first, self._first = self._first, None
        with self._failing():
            if first is not None:
                first.wait()
            for work in self._steps:
                work.wait()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Whatever it is, it belongs to the rank that waits."""
        try:
            yield
        except BaseException as error:
            self.error = error.with_traceback(None)  # which would hold the backend's work

    def wait(self) -> Tensor:
        self._watch(self._attempt)
        self._finished()
        assert self.result is not None
        return self.result

    def done(self) -> bool:
        return self.over.is_set()

    def _attempt(self, seconds: float) -> bool:
        over = self.over.wait(seconds)
        if over and self._failure is not None:
            raise CommClosed(self._failure)
        if over and self.error is not None:
            error, self.error = self.error, None
            self._failure = f"this message has failed before: {error}"
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return over


class Lane:
    """Messages in one direction between this rank and a peer."""

    def __init__(self, name: str) -> None:
        messages: queue.SimpleQueue[LaneOperation | None] = queue.SimpleQueue()
        self.add = messages.put
        self.close = weakref.finalize(self, messages.put, None)  # once what is on it is through
        self.ended = threading.Event()
        # A daemon: a message that never comes must not keep a process from ending.
        self.thread = threading.Thread(target=_run, args=(messages, self.ended), name=name, daemon=True)
        self.thread.start()


def close_lanes(lanes: Sequence[Lane], seconds: float, break_off: Callable[[], None], at_most: float) -> None:
    """Let what is on the lanes get through, for some seconds; then `break_off` wakes what is left of it, `at_most` so
    long."""
    for lane in lanes:
        lane.close()
    if not _have_ended(lanes, seconds):
        break_off()
        _have_ended(lanes, at_most)


def _have_ended(lanes: Sequence[Lane], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    others = [lane for lane in lanes if lane.thread is not threading.current_thread()]  # which may hold the last of it
    return all(lane.ended.wait(max(deadline - time.monotonic(), 0)) for lane in others)


def _run(messages: queue.SimpleQueue[LaneOperation | None], ended: threading.Event) -> None:
    while (message := messages.get()) is not None:
        with inside_the_backend(message.over):
            message.run()
            del message  # first: once its rank hears of it, nobody but that holds what it holds
    ended.set()
