"""How long a rank has waited, as far as it could have seen anything happen.

A job that is paused as a whole (the lid of a laptop, SIGSTOP) finds on waking that hours have passed, and nobody was
late. So waits are counted by looks: the time between two of them counts for no more than looks can be apart. A rank
that is paused alone is still late, by the looks of the others.
"""

from __future__ import annotations

import time

LONGEST = 1.0  # seconds between two looks: a pause, or a machine so busy that the others were late to look as well


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
