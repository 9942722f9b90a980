"""Calls that may never return: to a store on an unreachable machine, or to a name server that does not answer.

Python handles signals only between its own instructions, so SIGTERM and ^C would not end a main thread inside such a
call. In another thread the call may block for ever, and nothing has to wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from torch.distributed import DistError

T = TypeVar("T")


class NoAnswer(DistError):
    """A call has not returned in time; `pending` may still get its answer."""

    def __init__(self, seconds: float, pending: Future[Any]) -> None:
        super().__init__(f"no answer within {seconds:g} s")
        self.pending = pending


def aside(job: Callable[[], T], seconds: float | None = None) -> T:
    """Run `job` in another thread; its result or error. `NoAnswer` after `seconds`, if given."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(job())
        except BaseException as error:  # raised in the calling thread
            answer.set_exception(error)

    threading.Thread(target=work, name="sherd-launch-aside", daemon=True).start()
    if not wait([answer], seconds).done and seconds is not None:
        raise NoAnswer(seconds, answer)
    return answer.result()
