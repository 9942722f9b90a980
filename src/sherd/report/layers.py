"""Layers over time, for runs that recorded them: a row per layer, darker where the number is larger."""

from __future__ import annotations

import math
from collections.abc import Callable

from sherd.observe.rows import LayerFigures
from sherd.report.panels import Panel, Run, axis

COLUMNS = 400
SCALE = [
    [0, "rgba(61,116,214,0.05)"],
    [1, "rgba(61,116,214,1)"],
]  # the smallest is barely visible, in light and dark themes


def norms(run: Run) -> Panel | None:
    """Gradient norms by layer."""
    return _heat("Gradient norm by layer", run, lambda layer: layer.norm)


def update_ratios(run: Run) -> Panel | None:
    """How large updates are relative to the values they change."""
    return _heat("Update by layer, over the length of its values", run, lambda layer: layer.update_ratio)


def _heat(title: str, run: Run, value: Callable[[LayerFigures], float | None]) -> Panel | None:
    rows = [row for row in run.record.steps if row.layers]
    names = list(dict.fromkeys(name for row in rows for name in row.layers))
    if not names:
        return None
    stride = math.ceil(len(rows) / COLUMNS)
    shown = rows[::stride]
    cells = [[_power(value(row.layers[name])) if name in row.layers else None for row in shown] for name in names]
    data = {
        "type": "heatmap",
        "x": [row.step for row in shown],
        "y": names,
        "z": cells,
        "colorscale": SCALE,
        "colorbar": {"thickness": 8, "outlinewidth": 0, "tickprefix": "10^", "len": 0.9},
        "hovertemplate": "%{y}, step %{x}: 10^%{z:.2f}<extra></extra>",
    }
    layout = {"xaxis": axis("step"), "yaxis": axis(autorange="reversed", type="category"), "hovermode": "closest"}
    note = "Powers of ten." if stride == 1 else f"Powers of ten, every {stride} steps."
    return Panel(title, note, [data], layout, height=110 + 18 * max(len(names), 6), run=run)


def _power(value: float | None) -> float | None:
    return round(math.log10(value), 3) if value is not None and math.isfinite(value) and value > 0 else None
