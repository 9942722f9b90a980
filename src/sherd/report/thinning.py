"""Curves of any length drawn with a bounded number of points, without losing a spike."""

from __future__ import annotations

import math
from collections.abc import Sequence

LIMIT = 2000
"""Points of a curve: more than a screen has columns, few enough to pan smoothly."""


def thinned(values: Sequence[float | None], limit: int = LIMIT) -> list[int]:
    """The points to draw, at most `limit`, in order: the first, the last, and the smallest and largest of each bin.

    Non-finite values cannot be drawn. A bin that has no others keeps its first, so that a gap stays a gap.
    """
    count = len(values)
    if count <= limit:
        return list(range(count))
    bins = (limit - 2) // 2
    kept = {0, count - 1}
    for number in range(bins):
        inside = range(count * number // bins, count * (number + 1) // bins)
        finite = [(value, index) for index in inside if (value := values[index]) is not None and math.isfinite(value)]
        kept |= {min(finite)[1], max(finite)[1]} if finite else {inside[0]}
    return sorted(kept)


def smoothed(values: Sequence[float | None], span: float) -> list[float | None]:
    """The exponential moving average over about `span` points on both sides, so that it does not lag."""
    known = [value if value is not None and math.isfinite(value) else None for value in values]
    before = _decaying(known, span)
    after = _decaying(known[::-1], span)[::-1]
    return [
        None if value is None else (left[0] + right[0] - value) / (left[1] + right[1] - 1)
        for value, left, right in zip(known, before, after, strict=True)
    ]


def _decaying(values: Sequence[float | None], span: float) -> list[tuple[float, float]]:
    """Sums of values up to each one, and of their weights, which decay with the distance."""
    keep = 1 - 1 / max(span, 1.0)
    total = weight = 0.0
    sums = []
    for value in values:
        total, weight = keep * total, keep * weight
        if value is not None:
            total, weight = total + value, weight + 1
        sums.append((total, weight))
    return sums
