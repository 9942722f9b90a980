"""A panel is one plot of the page: plotly's data, with its title and note. Colours of runs, phases and kinds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sherd.observe.runs import RunRecord
from sherd.report.wording import BYTE_UNITS

RUNS = ("#3d74d6", "#e07b39", "#2a9d8f", "#b3589a", "#8c8a2f", "#7a6fd0", "#c94f5d", "#4f8f4f")
PHASE_COLOURS = {
    "data": "#e0b24a",
    "forward": "#8fb8ea",
    "backward": "#3d74d6",
    "communication": "#e0674c",
    "update": "#4faa8b",
    "rest": "#a9adb5",
}
KIND_COLOURS = {
    "parameters": "#3d74d6",
    "gradients": "#e0b24a",
    "optimizer state": "#4faa8b",
    "buckets": "#b58ac9",
    "outer state": "#8fb8ea",
}
STEPS = (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
SPARE = ("#8fb8ea", "#e0674c", "#a9adb5", "#8c8a2f", "#c7a17a", "#7aa6a1")


@dataclass(frozen=True)
class Run:
    """One run on the page: its record, label and colour."""

    record: RunRecord
    label: str
    colour: str


@dataclass(frozen=True)
class Panel:
    """One plot. `wide`: full width; `log`: offers a logarithmic axis; `timed`: offers time as the x axis."""

    title: str
    note: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 300
    wide: bool = False
    log: bool = False
    timed: bool = False
    run: Run | None = None  # if it shows one of several runs
    numbers: str = "yaxis"  # the axis with the numbers
    top: float | None = None  # the end of that axis, so that plots side by side can share it
    in_bytes: bool = False


@dataclass(frozen=True)
class Section:
    """Panels under one heading, in a number of columns."""

    title: str
    panels: list[Panel]
    columns: int = 2


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """An axis of the page; the colours come with the theme."""
    return {"title": {"text": title, "standoff": 8}, "automargin": True, "zeroline": False, **more}


def byte_ticks(largest: float) -> dict[str, Any]:
    """Ticks at round numbers of KiB, MiB or GiB: plotly's own are powers of ten."""
    if largest < 1:
        return {}
    power = min(int(math.log2(largest)) // 10, len(BYTE_UNITS) - 1)
    unit = 1 << 10 * power
    step = next((size for size in STEPS if size * unit * 6 >= largest), STEPS[-1])
    counts = [number * step for number in range(int(largest / (step * unit)) + 2)]
    texts = [f"{count:g} {BYTE_UNITS[power]}" if count else "0" for count in counts]
    return {"tickmode": "array", "tickvals": [count * unit for count in counts], "ticktext": texts}


def colours_of(names: Iterable[str], known: dict[str, str]) -> dict[str, str]:
    """A colour for each name: its own if it has one, else the next spare one."""
    listed = list(names)
    spare = [name for name in listed if name not in known]
    return {name: known[name] if name in known else SPARE[spare.index(name) % len(SPARE)] for name in listed}


def runs_of(records: Sequence[RunRecord], labels: Sequence[str]) -> list[Run]:
    """Every record with a label and a colour."""
    pairs = zip(records, labels, strict=True)
    return [Run(record, label, RUNS[number % len(RUNS)]) for number, (record, label) in enumerate(pairs)]
