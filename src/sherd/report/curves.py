"""Curves over the steps of runs, all runs in one plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from sherd.observe.rows import StepRow
from sherd.report.panels import Panel, Run, axis, byte_ticks
from sherd.report.thinning import smoothed, thinned

SMOOTH_FROM = 60  # steps
MARKED_UP_TO = 60  # points
Value = Callable[[StepRow], float | None]


def figures_of_loss(runs: Sequence[Run]) -> list[str]:
    """Figures to plot with the loss: those with that word in their name."""
    return [name for name in _figure_names(runs) if "loss" in name.lower()]


def loss(runs: Sequence[Run]) -> Panel | None:
    """The training loss of every run, and every logged figure that is also a loss."""
    data = [trace for run in runs for trace in _losses(run, len(runs) == 1)]
    for name in figures_of_loss(runs):
        data += _curves(runs, name, _figure(name), sparse=True, dash="dash", named=True)
    note = (
        "Mean over ranks by samples. The bold line is smoothed." if _any_smooth(data) else "Mean over ranks by samples."
    )
    return _panel("Loss", note, data, axis(), wide=True, height=400, log=True)


def _losses(run: Run, alone: bool) -> list[dict[str, Any]]:
    """The losses of a run, as `StepTable.losses` gives them: the reported ones if any, else those of its backwards."""
    steps = run.record.steps
    told, name = steps.reports_loss, steps.loss_name
    sparse = told and any(row.reported_loss is None for row in steps)
    traces = _curves([run], name, lambda row: row.reported_loss if told else row.root, smooth=True, sparse=sparse)
    shown = name if alone else run.label if told else f"{run.label}: {name}"
    return [trace | {"name": shown} for trace in traces]


def figures(runs: Sequence[Run]) -> list[Panel]:
    """One plot for every other figure of `sherd.log`."""
    beside_loss = set(figures_of_loss(runs))
    panels = [
        _panel(name, "", _curves(runs, name, _figure(name), smooth=True, sparse=True), axis(), log=True)
        for name in _figure_names(runs)
        if name not in beside_loss
    ]
    return [panel for panel in panels if panel]


def throughput(runs: Sequence[Run]) -> Panel | None:
    """Tokens per second if every run reports them, else samples."""
    tokens = reports_tokens(runs)
    unit = "tokens" if tokens else "samples"
    data = _curves(
        runs, f"{unit}/s", lambda row: row.tokens_per_second if tokens else row.samples_per_second, smooth=True
    )
    return _panel(f"{unit.capitalize()} per second", "All ranks together.", data, axis(rangemode="tozero"), log=True)


def reports_tokens(runs: Sequence[Run]) -> bool:
    """Whether every run reported tokens, so that runs can be compared by them."""
    return all(any(row.tokens_per_second for row in run.record.steps) for run in runs)


def step_time(runs: Sequence[Run]) -> Panel | None:
    """How long each step took."""
    data = _curves(runs, "seconds", lambda row: row.duration, smooth=True)
    durations = [row.duration for run in runs for row in run.record.steps if row.duration]
    return _panel("Seconds per step", "Of the slowest rank.", data, axis(**usual_range(durations)), log=True)


def distance(runs: Sequence[Run]) -> Panel | None:
    """How far ranks were from their consensus when they exchanged parameters."""
    data = _curves(runs, "distance", lambda row: row.distance)
    text = "Root mean square over the ranks, or groups, that train apart, just before they exchanged parameters."
    return _panel("Distance from the consensus", text, data, axis())


def norm(runs: Sequence[Run]) -> Panel | None:
    """The norm of the whole gradient."""
    data = _curves(runs, "norm", lambda row: row.norm, smooth=True)
    return _panel("Gradient norm", "Of the whole gradient, over all ranks.", data, axis(), log=True)


def learning_rate(runs: Sequence[Run]) -> Panel | None:
    """The learning rate of the optimizer's first group, and of the others if they differ."""
    data = _curves(runs, "lr", lambda row: row.lr[0] if row.lr else None)
    groups = max((len(row.lr) for run in runs for row in run.record.steps), default=0)
    for number in range(1, groups):
        if any(len(row.lr) > number and row.lr[number] != row.lr[0] for run in runs for row in run.record.steps):
            data += _curves(runs, f"group {number}", _group_rate(number), dash="dot", named=True)
    return _panel(
        "Learning rate",
        "Of the optimizer's first group.",
        data,
        axis(rangemode="tozero", exponentformat="power"),
        log=True,
    )


def sent(runs: Sequence[Run]) -> Panel | None:
    """Bytes that all ranks sent in a step."""
    data = _curves(runs, "payload", lambda row: row.bytes.get("payload"))
    data += _curves(runs, "control", lambda row: row.bytes.get("control"), dash="dot", named=True)
    note = "What all ranks sent in a step: payload, and the control messages around it."
    return _panel("Bytes per step", note, data, _byte_axis(data), log=True)


def resident(runs: Sequence[Run]) -> Panel | None:
    """Resident memory of the processes of each host, as the system counts it."""
    data = []
    for run in runs:
        hosts = dict.fromkeys(name for row in run.record.steps for name in row.host_resident)
        for number, host in enumerate(hosts):
            dash = ("solid", "dash", "dot", "dashdot")[number % 4]
            named = {"name": host if len(runs) == 1 else f"{run.label}: {host}"}
            data += [trace | named for trace in _curves([run], host, _host_resident(host), dash=dash)]
    note = "Resident memory of each host's ranks: private pages added up, shared ones once."
    return _panel("Processes over time", note, data, _byte_axis(data))


def _curves(
    runs: Sequence[Run],
    name: str,
    value: Value,
    smooth: bool = False,
    sparse: bool = False,
    dash: str = "solid",
    named: bool = False,
) -> list[dict[str, Any]]:
    """A curve for each run that has values. `sparse`: not in every step; `named`: several kinds share the plot."""
    traces = []
    for run in runs:
        rows = [row for row in run.record.steps if value(row) is not None] if sparse else list(run.record.steps)
        values = [value(row) for row in rows]
        if all(each is None for each in values):
            continue
        label = name if len(runs) == 1 else f"{run.label}: {name}" if named else run.label
        soft = smooth and len(rows) >= SMOOTH_FROM
        raw = _trace(run, rows, values, label, {"color": run.colour, "width": 1 if soft else 1.8, "dash": dash})
        if sparse and len(rows) <= MARKED_UP_TO:
            raw |= {"mode": "lines+markers", "marker": {"size": 6, "color": run.colour}, "cliponaxis": False}
        traces.append(raw)
        if soft:
            raw |= {"opacity": 0.35}
            line = _trace(
                run, rows, smoothed(values, max(len(rows) / 100, 4)), label, {"color": run.colour, "width": 2.2}
            )
            traces.append(line | {"hoverinfo": "skip", "meta": {**line["meta"], "smooth": True}})
    return traces


def _trace(
    run: Run, rows: Sequence[StepRow], values: Sequence[float | None], name: str, line: dict[str, Any]
) -> dict[str, Any]:
    kept = thinned(values)
    begin = run.record.start_time or run.record.steps[0].t
    return {
        "type": "scatter",
        "mode": "lines" if len(kept) > 1 else "markers",
        "name": name,
        "x": [rows[index].step for index in kept],
        "y": [finite(values[index]) for index in kept],
        "line": line,
        "meta": {"time": [round(rows[index].t - begin, 3) for index in kept], "points": len(values)},
        "hovertemplate": "%{y:.5~g}",
    }


def _panel(title: str, note: str, data: list[dict[str, Any]], y: dict[str, Any], **more: Any) -> Panel | None:
    layout = {"xaxis": axis("step"), "yaxis": y, "hovermode": "x unified"}
    return Panel(title, note, data, layout, timed=True, **more) if data else None


def _byte_axis(data: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return axis(rangemode="tozero", **byte_ticks(max((y for trace in data for y in trace["y"] if y), default=0)))


def usual_range(values: Sequence[float]) -> dict[str, Any]:
    """An axis from zero to above all but outliers: a slow first step would flatten the rest."""
    if not values:
        return {"rangemode": "tozero"}
    return {"range": [0, usual_top(values)]}


def usual_top(values: Sequence[float]) -> float:
    """A little above all values but outliers."""
    usual = sorted(values)[min(int(len(values) * 0.98), len(values) - 1)]
    return max(values) * 1.05 if max(values) <= usual * 1.5 else usual * 1.2


def finite(value: float | None) -> float | None:
    """A number that can be plotted, to seven digits; None is a gap."""
    return float(f"{value:.7g}") if value is not None and math.isfinite(value) else None


def _figure_names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.record.steps.figure_names))


def _figure(name: str) -> Value:
    return lambda row: row.figures.get(name)


def _group_rate(number: int) -> Value:
    return lambda row: row.lr[number] if len(row.lr) > number else None


def _host_resident(host: str) -> Value:
    return lambda row: row.host_resident.get(host)


def _any_smooth(data: Sequence[dict[str, Any]]) -> bool:
    return any(trace["meta"].get("smooth") for trace in data)
