"""How a loss scale follows what overflows. Pure arithmetic: the same steps give the same scale on every rank."""

from __future__ import annotations

import enum

from sherd.config import LossScale


class Change(enum.Enum):
    """What a step did to the scale."""

    NONE = "as it was"
    GROWN = "larger"
    REDUCED = "smaller"
    EXHAUSTED = "too large at its smallest"
    """it is at its floor and was to become smaller"""


class DynamicScale:
    """A scale that grows after enough steps in a row without an overflow, and becomes smaller after overflows."""

    def __init__(self, options: LossScale) -> None:
        self.options = options
        self.value = options.initial
        self.good = 0
        """Steps in a row without an overflow, since it last could grow."""
        self.overflows = 0
        """Overflows since it last changed or could grow."""
        self.total_overflows = 0

    @property
    def state(self) -> tuple[float, int, int, int]:
        """All that changes, as another rank may take it over."""
        return self.value, self.good, self.overflows, self.total_overflows

    @state.setter
    def state(self, state: tuple[float, int, int, int]) -> None:
        self.value, self.good, self.overflows, self.total_overflows = state

    def step(self, finite: bool) -> Change:
        """Follow a step, whose gradient was finite on all ranks or not."""
        return self._count_good() if finite else self._count_overflow()

    def _count_good(self) -> Change:
        self.good += 1
        if self.good < self.options.growth_interval:
            return Change.NONE
        self.good = self.overflows = 0
        return self._become(min(self.value * self.options.growth, self.options.ceiling), Change.GROWN)

    def _count_overflow(self) -> Change:
        self.good = 0
        self.overflows += 1
        self.total_overflows += 1
        if self.overflows < self.options.hysteresis:
            return Change.NONE
        self.overflows = 0
        smaller = max(self.value * self.options.backoff, self.options.floor)
        return Change.EXHAUSTED if smaller == self.value else self._become(smaller, Change.REDUCED)

    def _become(self, value: float, change: Change) -> Change:
        before, self.value = self.value, value
        return Change.NONE if value == before else change
