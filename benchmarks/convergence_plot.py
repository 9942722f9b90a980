"""Curves as plain SVG, with both sets of colours, so that they can be read on light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 720, 380, 70, 24, 46, 48
COLOURS = ("#57606a", "#3d74d6", "#e0674c", "#4faa8b")
STYLE = """
    .page { fill: #ffffff } text { fill: #1f2328; font: 13px system-ui, sans-serif } .title { font-size: 16px }
    .grid { stroke: #d0d7de }
    @media (prefers-color-scheme: dark) { .page { fill: #0d1117 } text { fill: #e6edf3 } .grid { stroke: #30363d } }
"""


class Curve(NamedTuple):
    name: str
    x: Sequence[float]
    y: Sequence[float]


def plot(curves: Sequence[Curve], title: str, x_words: str, y_words: str) -> str:
    xs, ys = [x for curve in curves for x in curve.x], [y for curve in curves for y in curve.y]
    most, low, high = max(xs), min(ys), max(ys)
    spread = (high - low) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDE - LEFT - RIGHT) * x / most
        return across, TOP + (HIGH - TOP - BOTTOM) * (high - y) / spread

    parts = [f'<text class="title" x="{LEFT}" y="26">{escape(title)}</text>']
    for number in range(5):
        value = low + spread * number / 4
        _, y = place(0, value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDE - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        x, _ = place(most * number / 4, low)
        parts.append(f'<text x="{x:.1f}" y="{HIGH - 28}" text-anchor="middle">{most * number / 4:g}</text>')
    parts.append(f'<text x="{WIDE // 2}" y="{HIGH - 8}" text-anchor="middle">{escape(x_words)}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 6}">{escape(y_words)}</text>')
    for number, curve in enumerate(curves):
        points = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in zip(curve.x, curve.y, strict=True))
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>')
        name = f"{curve.name} {curve.y[-1]:.3f}"
        parts.append(
            f'<text x="{WIDE - RIGHT}" y="{TOP + 18 * number}" text-anchor="end" style="fill: {colour}">'
            f"{escape(name)}</text>"
        )
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" width="{WIDE}" height="{HIGH}">'
    page = f'<rect class="page" width="{WIDE}" height="{HIGH}"/>'
    return "\n".join([start, f"<style>{STYLE}</style>", page, *parts, "</svg>"]) + "\n"
