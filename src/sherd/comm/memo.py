"""A memory of things that are expensive to make: views, plans, texts."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memo(dict[K, V]):
    """Remembers up to `most` things, then starts over: shapes that change with every call must not pile up."""

    def __init__(self, most: int = 4096) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) > self._most:
            self.clear()
        super().__setitem__(key, value)
