"""How long a rank has waited, not counting the time in which it was suspended.

A job that is suspended as a whole (a closed laptop, SIGSTOP) finds on waking that hours have passed, though no rank was
late. So a stopwatch is read often, and the time between two readings counts for no more than readings can be apart. A
rank that is suspended alone is still late, by the stopwatches of the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST = 1.0  # seconds between two readings: more is a suspended job, or a machine so busy that every rank was held up


_without_limit = 0  # how many are inside; per process, as a thread of a communicator may wait for another


@contextmanager
def without_limit() -> Iterator[None]:
    """Inside, a rank may take as long as it needs: it does something for all of them, such as a download. A rank that
    dies is noticed all the same."""
    global _without_limit
    _without_limit += 1
    try:
        yield
    finally:
        _without_limit -= 1


def limit(seconds: float) -> float:
    """After how many seconds a late rank is an error, given the option `seconds`."""
    return math.inf if _without_limit else seconds


class Stopwatch:
    """Counts from when it was made. To be read far more often than every `longest` seconds."""

    __slots__ = ("_last", "_longest", "_seconds")

    def __init__(self, longest: float = LONGEST) -> None:
        self._longest = longest
        self._seconds = 0.0
        self._last = time.monotonic()

    def seconds(self) -> float:
        """Seconds so far; this is a reading."""
        now = time.monotonic()
        self._seconds += min(now - self._last, self._longest)
        self._last = now
        return self._seconds
