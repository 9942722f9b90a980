"""Where the time of a step goes: one thread's wall time, split into phases that do not overlap.

    data            waiting for the training loader
    forward         from the batch to the backward
    backward        inside `backward()`, without the waits in it
    communication   waiting for other ranks, in any phase
    update          inside `optimizer.step()`, without the waits in it
    rest            everything else

The clock is always in exactly one phase, and leaving a phase returns to the previous one, so nothing counts twice and
the phases add up to the elapsed time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import get_ident

PHASES = ("data", "forward", "backward", "communication", "update", "rest")
DATA, FORWARD, BACKWARD, COMMUNICATION, UPDATE, REST = range(len(PHASES))


class PhaseClock:
    """Nanoseconds by phase, of the thread that created it; other threads do not count."""

    def __init__(self, now: Callable[[], int] = time.monotonic_ns) -> None:
        self._now = now
        self._spent = [0] * len(PHASES)
        self._since = now()
        self._thread = get_ident()
        self.phase = REST

    def follow_this_thread(self) -> None:
        """Count this thread from now on."""
        self._thread = get_ident()

    def enter(self, phase: int) -> int:
        """Begin a phase; returns the previous one, to go back to."""
        before = self.phase
        if get_ident() == self._thread:  # called tens of times in a step, so no attribute lookup on a module
            now = self._now()
            self._spent[before] += now - self._since
            self._since = now
            self.phase = phase
        return before

    def spent(self) -> tuple[int, ...]:
        """Nanoseconds in each phase since the clock was created."""
        self.enter(self.phase)
        return tuple(self._spent)
