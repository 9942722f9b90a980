"""Numbers by rank and name, packed: every row of a long run has several of these."""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Mapping
from typing import Any


class ByRank:
    """What each rank reported, under the same names. What a rank did not report, or not as a number, is 0."""

    __slots__ = ("_names", "_ranks", "_values")

    def __init__(self, told: Mapping[int, Mapping[str, float]]) -> None:
        self._ranks = shared(tuple(told))
        self._names = shared(tuple(dict.fromkeys(name for each in told.values() for name in each)))
        self._values = array("d", (_number(each.get(name)) for each in told.values() for name in self._names))

    def __len__(self) -> int:
        return len(self._ranks)

    def floats(self) -> dict[int, dict[str, float]]:
        """As reported."""
        return {rank: dict(zip(self._names, self._of(row), strict=True)) for row, rank in enumerate(self._ranks)}

    def integers(self) -> dict[int, dict[str, int]]:
        """As reported, for bytes. Exact up to 2**53."""
        return {rank: {name: int(value) for name, value in each.items()} for rank, each in self.floats().items()}

    def sums(self) -> dict[str, int]:
        """Of all ranks, by name."""
        width = len(self._names)
        return {name: int(sum(self._values[column::width])) for column, name in enumerate(self._names)}

    def means(self) -> dict[str, float]:
        """Of all ranks, by name."""
        width, ranks = len(self._names), len(self._ranks)
        return {name: math.fsum(self._values[column::width]) / ranks for column, name in enumerate(self._names)}

    def largest(self) -> float | None:
        """The largest sum of a rank over all names."""
        return max((sum(self._of(row)) for row in range(len(self._ranks))), default=None)

    def _of(self, row: int) -> array[float]:
        width = len(self._names)
        return self._values[row * width : (row + 1) * width]


def _number(value: Any) -> float:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


@functools.cache
def shared(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """One object for all equal ones."""
    return value
