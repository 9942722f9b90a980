"""Stacked plots, one per run: time by phase, memory by kind, and which ranks wait."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sherd.observe.rows import PHASES, StepRow
from sherd.report.curves import finite, usual_top
from sherd.report.panels import KIND_COLOURS, PHASE_COLOURS, Panel, Run, axis, byte_ticks, colours_of
from sherd.report.thinning import thinned
from sherd.report.wording import of_bytes, of_seconds

LYING_UP_TO = 16  # horizontal bars, with their names in front; more of them are vertical


def phases_over_time(run: Run) -> Panel | None:
    """Time by phase of every step, stacked; the mean over ranks."""
    rows = [row for row in run.record.steps if row.seconds]
    if not rows:
        return None
    # The same steps for all phases: those where the whole step was shortest or longest.
    kept = thinned([sum(row.seconds.values()) for row in rows])
    begin = run.record.start_time or rows[0].t
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "phases",
            "name": phase,
            "x": [rows[index].step for index in kept],
            "y": [finite(rows[index].seconds.get(phase, 0.0)) for index in kept],
            "line": {"width": 0, "color": colour},
            "fillcolor": colour,
            "meta": {"time": [round(rows[index].t - begin, 3) for index in kept], "points": len(rows)},
            "hovertemplate": "%{y:.3~s}s",
        }
        for phase, colour in _phase_colours(rows).items()
    ]
    top = usual_top([sum(row.seconds.values()) for row in rows])
    y = axis(tickformat=".3~s", ticksuffix="s", range=[0, top])
    layout = {"xaxis": axis("step"), "yaxis": y, "hovermode": "x unified"}
    return Panel("Step by step", "Mean over ranks.", data, layout, timed=True, run=run, top=top)


def phases_by_rank(run: Run) -> Panel | None:
    """Mean time by phase of each rank."""
    rows = [row for row in run.record.steps if len(row.spent)]
    if not rows:
        return None
    phases = _phase_colours(rows)
    spent: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        for rank, seconds in row.seconds_by_rank.items():
            there = spent.setdefault(rank, {phase: [] for phase in phases})
            for phase in phases:
                there[phase].append(seconds.get(phase, 0.0))
    bars = {f"rank {rank}": {phase: _mean(values) for phase, values in spent[rank].items()} for rank in sorted(spent)}
    note = "Mean over steps. Communication is the part not hidden behind other work, including waiting for other ranks."
    return _bars("By rank", note, run, bars, phases, "s", of_seconds)


def memory_by_host(run: Run) -> Panel | None:
    """The largest memory by kind of each host."""
    return _memory("By host", run, lambda row: row.host_memory)


def memory_by_rank(run: Run) -> Panel | None:
    """The largest memory by kind of each rank."""
    return _memory("By rank", run, lambda row: {f"rank {rank}": kinds for rank, kinds in row.memory.items()})


def waiting(run: Run) -> Panel | None:
    """How long each rank waits for others in a step, and how often the others wait for it."""
    rows = [row for row in run.record.steps if len(row.spent) > 1]
    if not rows:
        return None
    spent: dict[int, list[float]] = {}
    last: dict[int, int] = {}
    for row in rows:
        waits = row.waiting
        for rank, seconds in waits.items():
            spent.setdefault(rank, []).append(seconds)
        late = min(waits, key=lambda rank: (waits[rank], rank))
        last[late] = last.get(late, 0) + 1
    ranks = sorted(spent)
    bars = {f"rank {rank}": {"waits": _mean(spent[rank])} for rank in ranks}
    note = (
        "Seconds a step that each rank waits for others: its communication above that of the rank with the least. "
        "Short bars are the stragglers; the label says in how many steps a rank was the last one."
    )
    panel = _bars("Who waits", note, run, bars, {"waits": PHASE_COLOURS["communication"]}, "s", of_seconds)
    panel.data[0]["text"] = [f"last in {100 * last.get(rank, 0) / len(rows):.0f}%" for rank in ranks]
    panel.data[0] |= {"textposition": "auto", "textangle": 0, "cliponaxis": False}
    return panel


def _memory(title: str, run: Run, of: Any) -> Panel | None:
    peak: dict[str, dict[str, int]] = {}
    for row in run.record.steps:
        for owner, kinds in of(row).items():
            if owner not in peak or sum(kinds.values()) > sum(peak[owner].values()):
                peak[owner] = kinds
    names = list(dict.fromkeys(name for kinds in peak.values() for name in kinds))
    used = [name for name in names if any(kinds.get(name) for kinds in peak.values())]
    if not used:
        return None
    note = "What the ranks allocated, at the step with the most."
    return _bars(title, note, run, peak, colours_of(used, KIND_COLOURS), "B", of_bytes)


def _bars(
    title: str,
    note: str,
    run: Run,
    bars: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    unit: str,
    said: Any,
) -> Panel:
    lying = len(bars) <= LYING_UP_TO
    owners = list(bars)
    data = []
    for name, colour in colours.items():
        values = [float(bars[owner].get(name, 0)) for owner in owners]
        place = {"x": values, "y": owners, "orientation": "h"} if lying else {"x": owners, "y": values}
        data.append(
            {
                "type": "bar",
                "name": name,
                **place,
                "marker": {"color": colour, "line": {"width": 0}},
                "customdata": [said(value) for value in values],
                "hovertemplate": f"%{{{'y' if lying else 'x'}}}: {name} %{{customdata}}<extra></extra>",
            }
        )
    largest = max(sum(parts.values()) for parts in bars.values())
    ticks = byte_ticks(largest) if unit == "B" else {"tickformat": ".3~s", "ticksuffix": unit}
    numbers = axis(rangemode="tozero", **ticks)
    # As wide as its text: a single bar would otherwise fill the whole plot.
    gap = max(0.28, 1 - 0.24 * len(bars)) if len(bars) < 3 else 0.28
    owner_axis = axis(autorange="reversed" if lying else True, type="category", showgrid=False)
    layout = {
        "barmode": "stack",
        "bargap": gap,
        "xaxis": numbers if lying else owner_axis,
        "yaxis": owner_axis if lying else numbers,
        "hovermode": "closest",
    }
    height = 70 + 36 * max(len(bars), 3) if lying else 300
    side = "xaxis" if lying else "yaxis"
    return Panel(title, note, data, layout, height, run=run, numbers=side, top=largest * 1.05, in_bytes=unit == "B")


def _phase_colours(rows: Sequence[StepRow]) -> dict[str, str]:
    found = dict.fromkeys(phase for row in rows for phase in row.seconds)
    ordered = [phase for phase in PHASES if phase in found] + [phase for phase in found if phase not in PHASES]
    return colours_of(ordered, PHASE_COLOURS)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
