"""Calls that may never return: of a store whose machine is out of reach, of a name server that does not answer.

Python hears of a signal between two of its own instructions only, so a main thread inside such a call is deaf: SIGTERM
and ^C would not end it. In a thread aside the call can wait, for as long as it likes, and nobody has to wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from torch.distributed import DistError

T = TypeVar("T")


def aside(job: Callable[[], T], seconds: float | None = None) -> T:
    """What `job` returns or raises in another thread. A `DistError` after `seconds`, if they are limited."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(job())
        except BaseException as error:  # it belongs to the one who asked
            answer.set_exception(error)

    threading.Thread(target=work, name="sherd-launch-aside", daemon=True).start()
    if not wait([answer], seconds).done:
        raise DistError(f"no answer within {seconds:g} s")
    return answer.result()
