"""How long a rank has waited, as far as it could have seen anything happen.

A job that is paused as a whole (the lid of a laptop, SIGSTOP) finds on waking that hours have passed, and nobody was
late. So waits are counted by looks: the time between two of them counts for no more than looks can be apart. A rank
that is paused alone is still late, by the looks of the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST = 1.0  # seconds between two looks: a pause, or a machine so busy that the others were late to look as well


_without_limit = 0  # how many are inside; of the process, as a thread of a communicator's may wait for another


@contextmanager
def without_limit() -> Iterator[None]:
    """Inside, a rank may be as late as it likes: it does what the others asked for, such as a download. One that dies
    is found all the same."""
    global _without_limit
    _without_limit += 1
    try:
        yield
    finally:
        _without_limit -= 1


def limit(seconds: float) -> float:
    """After how many seconds a late rank is an error, where `seconds` is the option."""
    return math.inf if _without_limit else seconds


class Stopwatch:
    """Counts from when it was made. To be looked at far more often than every `longest` seconds."""

    __slots__ = ("_last", "_longest", "_seconds")

    def __init__(self, longest: float = LONGEST) -> None:
        self._longest = longest
        self._seconds = 0.0
        self._last = time.monotonic()

    def seconds(self) -> float:
        """Seconds of watching so far; this is a look."""
        now = time.monotonic()
        self._seconds += min(now - self._last, self._longest)
        self._last = now
        return self._seconds
