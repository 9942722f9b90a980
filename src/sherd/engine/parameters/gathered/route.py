"""The order in which buckets are used, learned from earlier steps.

The last three buckets predict the next: forward and backward go through the same buckets in opposite directions. Where
the same three were followed by different buckets, there is no prediction, so that a model that takes a different path
each time gathers nothing in vain. A prediction depends only on what was used: ranks that use the same predict the same.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar, cast

END = -1
"""The end of a step: what was gathered before it is out of date."""
_UNSURE = -2
_MOST = 1 << 16
"""The number of contexts to remember."""

T = TypeVar("T", bound=Hashable)


class Route(Generic[T]):
    """Learns an order and predicts it."""

    def __init__(self) -> None:
        self._last: tuple[T | int, ...] = (END, END, END)
        self._next: dict[tuple[T | int, ...], T | int] = {}

    def visit(self, bucket: T | int) -> bool:
        """A bucket is used; return whether it is another one than before."""
        if bucket == self._last[2]:
            return False
        if len(self._next) >= _MOST:
            self._next.clear()
        if self._next.setdefault(self._last, bucket) != bucket:
            self._next[self._last] = _UNSURE
        self._last = (*self._last[1:], bucket)
        return True

    def end(self) -> None:
        """What was gathered is out of date."""
        self.visit(END)

    def ahead(self, count: int) -> list[T]:
        """The buckets expected next, at most `count`; none beyond the end of a step."""
        last, found = self._last, list[T]()
        while len(found) < count:
            bucket = self._next.get(last, END)
            if bucket in (END, _UNSURE):
                break
            found.append(cast("T", bucket))
            last = (*last[1:], bucket)
        return found
