"""Where the time of a step goes: one thread's wall time, split into phases that exclude each other.

    data            waiting for the training loader
    forward         from the batch to the backward
    backward        inside `backward()`, but for the waits in it
    communication   waiting for other ranks, in whatever phase
    update          inside `optimizer.step()`, but for the waits in it
    rest            everything else

The clock is always in one phase. Whoever enters another one comes back to the phase before, so nothing counts twice and
the phases add up to the time that has passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import get_ident

PHASES = ("data", "forward", "backward", "communication", "update", "rest")
DATA, FORWARD, BACKWARD, COMMUNICATION, UPDATE, REST = range(len(PHASES))


class PhaseClock:
    """Nanoseconds by phase, of the thread that made it: what other threads enter counts nothing."""

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
        """Begin a phase; gives the one before, to come back to."""
        before = self.phase
        if get_ident() == self._thread:  # called tens of times in a step: no look-up of a module's attribute
            now = self._now()
            self._spent[before] += now - self._since
            self._since = now
            self.phase = phase
        return before

    def spent(self) -> tuple[int, ...]:
        """Nanoseconds in each phase since the clock was made."""
        self.enter(self.phase)
        return tuple(self._spent)
