"""Asking the store, which may be on a host that cannot be reached any more.

A question over a cut cable is answered after a quarter of an hour, when the kernel gives up. So questions are asked on
a thread of their own, and whoever asks waits for a bounded time.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch.distributed import DistNetworkError, Store

LIMIT = 0.5  # seconds; an answer takes less than a millisecond


class Inquiry:
    """Questions to a store, answered one after another. The store is dropped with this, or when it is closed."""

    def __init__(self, store: Store) -> None:
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._open: _Question | None = None  # the last one that was not answered in time
        self.gone = False
        """Whether the store has ended: it does not come back."""
        self._end = weakref.finalize(self, self._questions.put, None)
        # A daemon: an answer that never comes must not keep a process from ending.
        threading.Thread(target=_answer_all, args=(store, self._questions), name="sherd-store", daemon=True).start()

    def ask(self, question: Callable[[Any], Any]) -> Any:
        """The answer, or None when the store is gone or silent: then there is nobody left to tell."""
        return None if self.silent_for() else self._put(question)

    def tell(self, question: Callable[[Any], Any]) -> None:
        """The same for what must not be lost: a store that is silent just now hears of it when it answers again."""
        self._put(question, wait=not self.silent_for())

    def _put(self, question: Callable[[Any], Any], wait: bool = True) -> Any:
        if self.gone:
            return None
        asked = _Question(question)
        self._questions.put(asked)
        if not wait:
            return None
        # In two halves: the time of a job that was paused meanwhile is up at once, and then it has the other.
        if not asked.answered.wait(LIMIT / 2) and not asked.answered.wait(LIMIT / 2):
            self._open = asked
            return None
        self.gone = self.gone or asked.gone
        return asked.answer

    def close(self) -> None:
        """After what was asked already."""
        self.gone = True
        self._end()

    def silent_for(self) -> float:
        """Seconds since the store has stopped to answer, 0 while it does."""
        if self._open is None or self._open.answered.is_set():
            return 0.0
        return time.monotonic() - self._open.since


class _Question:
    def __init__(self, question: Callable[[Any], Any]) -> None:
        self.question = question
        self.since = time.monotonic()
        self.answered = threading.Event()
        self.answer: Any = None
        self.gone = False  # the connection is lost, and will not come back


def _answer_all(store: Store, questions: queue.SimpleQueue[_Question | None]) -> None:
    while (asked := questions.get()) is not None:
        try:
            asked.answer = asked.question(store)
        except Exception as error:  # what strangers left there may be anything, and others have questions too
            asked.gone = isinstance(error, DistNetworkError)
        asked.answered.set()
        del asked
