"""What a communicator has sent: payload and control bytes per operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Count:
    """Calls of one operation and the bytes this rank sent for them."""

    calls: int = 0
    payload: int = 0
    control: int = 0


class Counters:
    """Counts by operation.

    *Payload* is tensor data that other ranks read from this rank; *control* is everything else that is sent:
    fingerprints and headers. The payload of a broadcast counts for its root, whatever tree the backend uses.
    """

    def __init__(self) -> None:
        self.by_operation: dict[str, Count] = {}
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
        total = Count()
        for count in self.by_operation.values():
            total.calls += count.calls
            total.payload += count.payload
            total.control += count.control
        return total

    def reset(self) -> None:
        self.by_operation.clear()
