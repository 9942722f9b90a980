"""Curves as an SVG file, light or dark as the reader's page is: what the benchmarks save for the docs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 360, 60, 46, 40, 16
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
STYLE = "text{font:13px sans-serif;fill:#444}.grid{stroke:#8886}@media(prefers-color-scheme:dark){text{fill:#bbb}}"


@dataclass(frozen=True)
class Curve:
    name: str
    points: Sequence[tuple[float, float]]


def line_plot(title: str, x_title: str, y_title: str, curves: Sequence[Curve]) -> str:
    """The text of an SVG file."""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    if not xs:
        raise ValueError(f"{title!r} has no points to draw")
    x_ticks, y_ticks = _ticks(min(xs), max(xs)), _ticks(min(ys), max(ys))
    x_range, y_range = (min(xs), max(xs)), (min(*ys, y_ticks[0]), max(*ys, y_ticks[-1]))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_range[0]) / ((x_range[1] - x_range[0]) or 1)
        up = (y - y_range[0]) / ((y_range[1] - y_range[0]) or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP)

    parts = [f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>']
    for tick in y_ticks:
        _, y = place(x_range[0], tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        x, _ = place(tick, y_range[0])
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_title)}</text>')
    parts.append(
        f'<text transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y_title)}</text>'
    )
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve.points))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{line}"/>')
        y = TOP + 18 * number + 8
        parts.append(
            f'<line x1="{WIDTH - 250}" x2="{WIDTH - 226}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>'
        )
        parts.append(f'<text x="{WIDTH - 220}" y="{y + 4}">{escape(curve.name)}</text>')
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"><style>{STYLE}</style>'
    return "\n".join([opening, *parts, "</svg>\n"])


def _ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers that cover the range."""
    step = 10 ** math.floor(math.log10(((high - low) or 1.0) / about))
    step *= next((factor for factor in (1, 2, 5) if (high - low) / (step * factor) <= about), 10)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 12) for number in range(first, last + 1)]
