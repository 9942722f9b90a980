"""The pictures of docs/averaging.md and docs/diloco.md: `python docs/images/exchanges.py` writes them beside this file.

When teams exchange is asked of the policies themselves. Plain SVG with its own background and both sets of colours.
"""

from __future__ import annotations

import runpy
from html import escape
from pathlib import Path
from typing import NamedTuple

import torch

import sherd
from sherd.comm import SoloCommunicator
from sherd.strategies import Strategy
from sherd.strategies.averaging import AveragingPolicy

STEPS, TEAMS = 24, 2
CELL, HIGH, LEFT, MARGIN, ROW = 27, 20, 275, 24, 26
"""The width and height of a step, where steps begin, around the picture, and from row to row, in pixels."""
STYLE = (
    runpy.run_path(str(Path(__file__).with_name("walk.py")))["STYLE"]
    + """
    .step { fill: #dbe6f8; stroke: #7d8590 } .summed { fill: #4faa8b; stroke: #7d8590 }
    .meet { fill: #e0674c } .wire { stroke: #e0674c; stroke-width: 5; fill: none }
    @media (prefers-color-scheme: dark) { .step { fill: #1f2f4a } }
"""
)


class Line(NamedTuple):
    """A strategy, and what is said beside it."""

    words: tuple[str, ...]
    strategy: Strategy


AVERAGING = (
    Line(("ddp", "gradients in every step"), sherd.DDP()),
    Line(("LocalSGD(every=8)", "parameters every 8 steps"), sherd.LocalSGD(every=8)),
    Line(("LocalSGD(every=5, warmup=4)", "summed first"), sherd.LocalSGD(every=5, warmup=4)),
)
DILOCO = (
    Line(("DiLoCo(every=12)", "all at once"), sherd.DiLoCo(every=12)),
    Line(
        ("DiLoCo(every=12,", "fragments=3, delay=3)"),
        sherd.DiLoCo(every=12, fragments=3, delay=3),
    ),
)


def spans(strategy: Strategy) -> tuple[list[int], list[tuple[int, int, int]]]:
    """The steps in which gradients are summed over all; and exchanges: row, first and last step."""
    policy = strategy.policy(SoloCommunicator(), torch.device("cpu"))
    if not isinstance(policy, AveragingPolicy):
        return list(range(STEPS)), []
    warmup, rows, delay = strategy.warmup, getattr(strategy, "fragments", 1), getattr(strategy, "delay", None) or 0
    found = []
    for row in range(rows):
        for step in range(warmup, STEPS):
            after = policy.after_warmup(step)
            if after % strategy.every == (row + 1) * strategy.every // rows % strategy.every:
                assert policy.due(step)
                found.append((row, step, min(step + delay, STEPS - 1)))
    return list(range(warmup)), found


def picture(lines: tuple[Line, ...], title: str) -> str:
    parts, top = [], MARGIN
    for line in lines:
        summed, exchanges = spans(line.strategy)
        rows = max((row for row, *_ in exchanges), default=0) + 1
        for number, words in enumerate(line.words):
            style = "soft" if number and not words.startswith("frag") else "file"
            parts.append(f'<text class="{style}" x="{MARGIN}" y="{top + 15 + 18 * number}">{escape(words)}</text>')
        for team in range(TEAMS):
            y = top + team * (HIGH + (rows + 1) * 8)
            for step in range(STEPS):
                kind, x = "summed" if step in summed else "step", LEFT + 60 + step * CELL
                parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{CELL - 3}" height="{HIGH}" rx="3"/>')
            parts.append(f'<text class="soft" x="{LEFT}" y="{y + 15}">team {team}</text>')
        between = top + HIGH + 8
        for row, first, last in exchanges:
            x, y = LEFT + 60 + (first + 1) * CELL - 2, between + 8 * row
            parts.append(f'<circle class="meet" cx="{x}" cy="{y}" r="4"/>')
            if last > first:
                parts.append(f'<path class="wire" d="M{x} {y}H{x + (last - first) * CELL}"/>')
        top += TEAMS * HIGH + (rows + 1) * 8 + ROW
    wide, high = LEFT + 60 + STEPS * CELL + MARGIN, top
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}">'
    page = f'<rect class="page" width="{wide}" height="{high}"/>'
    return "\n".join([start, f"<title>{title}</title>", f"<style>{STYLE}</style>", page, *parts, "</svg>"]) + "\n"


PICTURES = {
    "averaging.svg": (AVERAGING, "When ranks exchange: in every step, or every so many"),
    "diloco.svg": (DILOCO, "DiLoCo at once, and in fragments that travel while ranks compute"),
}

if __name__ == "__main__":
    for name, (lines, title) in PICTURES.items():
        Path(__file__).with_name(name).write_text(picture(lines, title))
