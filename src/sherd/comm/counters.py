"""What a communicator has sent: payload and control bytes per operation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Count:
    """Calls of one operation and the bytes this rank sent for them."""

    calls: int = 0
    payload: int = 0
    control: int = 0


_NONE = Count()


class Counters:
    """Counts by operation.

    *Payload* is tensor data that other ranks read from this rank; *control* is everything else that is sent:
    fingerprints and headers. The payload of a broadcast counts for its root, whatever tree the backend uses.
    """

    def __init__(self) -> None:
        self.by_operation: dict[str, Count] = {}
        self.last_step: dict[str, Count] | None = None
        """Counts by operation of the last training step; None before the first."""
        self._before: dict[str, Count] = {}  # counts when the present one began
        self._agreeing = False

    def add(self, operation: str, payload: int, control: int) -> None:
        count = self.by_operation.get(operation)
        if count is None:
            count = self.by_operation[operation] = Count()
        count.calls += 1
        if self._agreeing:
            payload, control = 0, payload + control
        count.payload += payload
        count.control += control

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Calls inside carry what ranks must agree on, not training data: all of it counts as control."""
        before, self._agreeing = self._agreeing, True
        try:
            yield
        finally:
            self._agreeing = before

    def total(self) -> Count:
        return summed(self.by_operation.values())

    def begin_steps(self) -> None:
        """Training begins: what is counted from here on belongs to its first step."""
        self.last_step = None
        self._before = self._copy()

    def end_step(self) -> None:
        """A training step is over, and the next one begins."""
        self.last_step = self._since(self._before)
        if self.last_step:
            self._before = self._copy()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Calls inside belong to no training step."""
        start = self._copy()
        try:
            yield
        finally:
            for name, inside in self._since(start).items():
                self._before[name] = summed([self._before.get(name, Count()), inside])

    def _copy(self) -> dict[str, Count]:
        return {name: Count(c.calls, c.payload, c.control) for name, c in self.by_operation.items()}

    def _since(self, before: Mapping[str, Count]) -> dict[str, Count]:
        """What was counted since then, of operations that were called."""
        found = {}
        for name, now in self.by_operation.items():
            then = before.get(name, _NONE)
            if now.calls > then.calls:
                found[name] = Count(now.calls - then.calls, now.payload - then.payload, now.control - then.control)
        return found

    def reset(self) -> None:
        self.by_operation.clear()
        self.begin_steps()


def summed(counts: Iterable[Count]) -> Count:
    total = Count()
    for count in counts:
        total.calls += count.calls
        total.payload += count.payload
        total.control += count.control
    return total
