"""Operations under way over a process group: collectives, and sends and receives.

The backend moves a large message only while both ends wait for it, and only a wait shows that one is complete. So each
direction to each peer is a *lane* with a thread of its own: its messages go through in order, and two ranks may send to
each other before either receives.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist
from torch import Tensor

from sherd.comm.handle import Handle
from sherd.comm.waiting.side_thread import inside_the_backend
from sherd.errors import CommClosed

Steps = Iterator[dist.Work]
Wait = Callable[[], object]
"""Waits for a piece of the backend's work."""


class C10dHandle(Handle):
    """An operation as a generator that yields each piece of the backend's work it needs completed before it goes on."""

    __slots__ = ("_breaking", "_failure", "_finished", "_steps", "_wait", "_work")

    def __init__(
        self,
        steps: Steps,
        wait: Callable[[dist.Work], None],
        breaking: Callable[[], AbstractContextManager[None]],
        finished: Callable[[], None],
    ) -> None:
        self._steps = steps
        self._wait = wait
        self._breaking = breaking
        self._finished = finished
        self._failure: str | None = None
        with breaking():
            self._work: dist.Work | None = next(steps, None)

    def complete(self) -> None:
        """Go through all of it."""
        while self._work is not None:
            self._go_on()
        if self._failure is not None:
            raise CommClosed(self._failure)

    def wait(self) -> Tensor:
        self.complete()
        self._finished()
        return self.result

    def done(self) -> bool:
        while self._work is not None and self._work.is_completed():
            self._go_on()
        return self._work is None

    def _go_on(self) -> None:
        try:
            with self._breaking():
                work = self._work
                assert work is not None
                self._wait(work)
                if self._work is work:  # it may have been moved on while this waited
                    self._work = next(self._steps, None)
        except BaseException as error:
            # The backend's work keeps connections open, and the caller may keep this handle.
            self._failure = f"this call has failed already: {error}"
            self._work = None
            raise
        if self._work is None:
            self._breaking = nullcontext  # drop the communicator, which may refer to this handle


class LaneOperation(Handle):
    """An operation on a lane, such as a send or receive. `watch` waits for it and watches the peers."""

    __slots__ = ("_errors", "_failure", "_finished", "_first", "_steps", "_watch", "over")

    def __init__(
        self, steps: Iterator[Wait], watch: Callable[[Callable[[float], bool]], None], finished: Callable[[], None]
    ) -> None:
        self._steps = steps
        self._watch = watch
        self._finished = finished
        self.over = threading.Event()
        self._first: Wait | None = None
        self._errors: list[BaseException] = []  # one at most, until it is raised
        self._failure: str | None = None  # its text, once it was raised

    def start(self) -> None:
        """Go as far as possible without waiting, before the operation is put on its lane."""
        with self._failing():
            self._first = next(self._steps, None)

    def run(self) -> None:
        """The rest of it, on the lane's thread, which then sets `over`."""
        first, self._first = self._first, None
        with self._failing():
            if first is not None:
                first()
            for wait in self._steps:
                wait()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Keep any error for the rank that waits."""
        try:
            yield
        except BaseException as error:
            self._errors.append(error.with_traceback(None))  # which would keep the backend's work alive

    def wait(self) -> Tensor:
        self._watch(self._attempt)
        self._finished()
        return self.result

    def done(self) -> bool:
        return self.over.is_set()

    def _attempt(self, seconds: float) -> bool:
        over = self.over.wait(seconds)
        if over and self._failure is not None:
            raise CommClosed(self._failure)
        if over and self._errors:
            self._failure = f"this message has failed already: {self._errors[0]}"
            raise self._errors.pop()
        return over


class Lane:
    """Operations that go through one after another, such as the messages from this rank to a peer."""

    def __init__(self, name: str) -> None:
        operations: queue.SimpleQueue[LaneOperation | None] = queue.SimpleQueue()
        self.add = operations.put
        self.close = weakref.finalize(self, operations.put, None)  # once the operations on it are complete
        self.ended = threading.Event()
        # A daemon: a message that never arrives must not keep a process from ending.
        self.thread = threading.Thread(target=_run, args=(operations, self.ended), name=name, daemon=True)
        self.thread.start()


def close_lanes(lanes: Sequence[Lane], seconds: float, break_off: Callable[[], None], at_most: float) -> None:
    """Give the operations on the lanes some `seconds` to complete; then `break_off` wakes those that are left, which
    have `at_most` seconds to end."""
    for lane in lanes:
        lane.close()
    if not _have_ended(lanes, seconds):
        break_off()
        _have_ended(lanes, at_most)


def _have_ended(lanes: Sequence[Lane], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    others = [lane for lane in lanes if lane.thread is not threading.current_thread()]  # which may run this
    return all(lane.ended.wait(max(deadline - time.monotonic(), 0)) for lane in others)


def _run(operations: queue.SimpleQueue[LaneOperation | None], ended: threading.Event) -> None:
    while (operation := operations.get()) is not None:
        with inside_the_backend(operation.over):
            operation.run()
            del operation  # before its rank is told, which must then hold the only reference
    ended.set()
