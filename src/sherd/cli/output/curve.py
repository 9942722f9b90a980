"""A curve in a few lines of text: by plotext if it is installed, else with block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

BLOCKS = " ▁▂▃▄▅▆▇█"
MOST_POINTS = 400  # more than a terminal has columns; limits the cost of drawing a long run


def curve(steps: Sequence[int], values: Sequence[float], width: int, height: int) -> list[str]:
    """Lines of at most this width. Non-finite values are left out."""
    points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if len(points) < 2 or width < 20:
        return []
    points = thinned(points, MOST_POINTS)
    return _by_plotext(points, width, height) or _by_blocks(points, width, height)


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most `most` points: neighbours are averaged."""
    if len(points) <= most:
        return list(points)
    found = []
    for index in range(most):
        part = points[index * len(points) // most : (index + 1) * len(points) // most]
        found.append((part[-1][0], sum(value for _, value in part) / len(part)))
    return found


def _by_plotext(points: Sequence[tuple[int, float]], width: int, height: int) -> list[str]:
    """Empty without plotext, or if its interface has changed; then blocks are drawn."""
    try:
        import plotext
    except ImportError:
        return []
    draw: Any = plotext
    try:
        draw.clear_figure()
        draw.theme("clear")
        draw.plotsize(width, height)
        draw.plot([step for step, _ in points], [value for _, value in points], marker="braille")
        first, last = points[0][0], points[-1][0]
        draw.xticks(sorted({first + (last - first) * part // 4 for part in range(5)}))
        draw.yfrequency(4)
        draw.xaxes(True, False)
        draw.yaxes(True, False)
        drawn: str = draw.uncolorize(draw.build())
    except (AttributeError, TypeError, ValueError, IndexError, ZeroDivisionError):
        return []
    return [line.rstrip() for line in drawn.splitlines()]


def _by_blocks(points: Sequence[tuple[int, float]], width: int, height: int) -> list[str]:
    low, high = min(value for _, value in points), max(value for _, value in points)
    labels = [f"{high:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels)) + 1
    columns = thinned(points, width - margin)
    eighths = len(BLOCKS) - 1
    levels = [
        1 + round((value - low) / (high - low) * (height * eighths - 1)) if high > low else 1 for _, value in columns
    ]
    lines = []
    for row in reversed(range(height)):
        label = labels[0] if row == height - 1 else labels[1] if row == 0 else ""
        cells = (BLOCKS[min(max(level - row * eighths, 0), eighths)] for level in levels)
        lines.append(f"{label:>{margin - 1}} {''.join(cells)}".rstrip())
    return lines
