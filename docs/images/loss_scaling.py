"""The picture of docs/loss-scaling.md: `python docs/images/loss_scaling.py` writes it beside this file.

Every line is a scale that `DynamicScale` computed. Plain SVG with its own background and both sets of colours.
"""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import NamedTuple

import sherd
from sherd.engine.gradients.loss_scale import DynamicScale

STEPS = 48
OVERFLOWS_FROM, LATER = (13, 14), 28
"""Gradients do not fit at 2 to this power, and from this step on at that one."""
CELL, UNIT, LEFT, MARGIN, TOP = 15, 24, 236, 24, 92
"""The width of a step, the height of a doubling, where steps begin, around the picture, and where it begins."""
LOWEST, HIGHEST = 11, 15
SUBTITLE = "blue: the scale of each step. Red: a step that overflows and is skipped. Dashed: where gradients do not fit"
STYLE = (
    runpy.run_path(str(Path(__file__).with_name("walk.py")))["STYLE"]
    + """
    .scale { stroke: #0969da; stroke-width: 2; fill: none } .axis { stroke: #d0d7de }
    .overflow { fill: #e0674c } .limit { stroke: #e0674c; stroke-dasharray: 5 4; fill: none }
    @media (prefers-color-scheme: dark) {
      .scale { stroke: #58a6ff } .axis { stroke: #30363d } .overflow { fill: #ff8a6e } .limit { stroke: #ff8a6e }
    }
"""
)


class Line(NamedTuple):
    words: tuple[str, ...]
    options: sherd.LossScale


LINES = (
    Line(("hysteresis=1", "growth_interval=8"), sherd.LossScale(initial=2.0**14, growth_interval=8)),
    Line(("hysteresis=2", "growth_interval=8"), sherd.LossScale(initial=2.0**14, growth_interval=8, hysteresis=2)),
)


def limit(step: int) -> int:
    """The power of two at which the gradient of this step is not finite any more."""
    return OVERFLOWS_FROM[step >= LATER]


def scales(options: sherd.LossScale) -> list[tuple[float, bool]]:
    """For each step: the scale that it has, and whether its gradient overflows."""
    scale, found = DynamicScale(options), []
    for step in range(STEPS):
        overflows = scale.value >= 2.0 ** limit(step)
        found.append((scale.value, overflows))
        scale.step(finite=not overflows)
    return found


def across(step: float) -> float:
    return LEFT + step * CELL


def text(x: float, y: float, words: str, style: str = "soft") -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{words}</text>'


def plot(line: Line, top: float) -> list[str]:
    def down(power: float) -> float:
        return top + (HIGHEST - power) * UNIT

    parts = [text(MARGIN, top + 20 + 20 * number, words, "file") for number, words in enumerate(line.words)]
    for power in range(LOWEST, HIGHEST + 1):
        parts.append(f'<path class="axis" d="M{LEFT} {down(power):g}H{across(STEPS):g}"/>')
        parts.append(text(LEFT - 54, down(power) + 5, f"{2**power:,}"))
    change = f"H{across(LATER):g}V{down(limit(LATER)):g}H{across(STEPS):g}"
    parts.append(f'<path class="limit" d="M{LEFT} {down(limit(0)):g}{change}"/>')
    found = scales(line.options)
    way = "".join(f"V{down(math.log2(value)):g}H{across(step + 1):g}" for step, (value, _) in enumerate(found))
    parts.append(f'<path class="scale" d="M{LEFT} {down(math.log2(found[0][0])):g}{way}"/>')
    for step, (value, overflows) in enumerate(found):
        if overflows:
            y = down(math.log2(value))
            parts.append(f'<circle class="overflow" cx="{across(step + 0.5):g}" cy="{y:g}" r="5"/>')
    return parts


def picture(title: str) -> str:
    parts = [
        text(MARGIN, MARGIN + 14, "The scale follows what overflows", "title"),
        text(MARGIN, MARGIN + 36, SUBTITLE),
    ]
    top = TOP
    for line in LINES:
        parts += plot(line, top)
        top += (HIGHEST - LOWEST) * UNIT + 48
    wide, high = across(STEPS) + MARGIN, top - 24 + MARGIN
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}">'
    page = f'<rect class="page" width="{wide}" height="{high}"/>'
    return "\n".join([start, f"<title>{title}</title>", f"<style>{STYLE}</style>", page, *parts, "</svg>"]) + "\n"


PICTURES = {"loss_scaling.svg": ("How a loss scale grows, and becomes smaller when gradients overflow",)}

if __name__ == "__main__":
    for name, arguments in PICTURES.items():
        Path(__file__).with_name(name).write_text(picture(*arguments))
