"""Which plots a page has, in the order of its sections. A plot without data is left out, and so is an empty section."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sherd.report import curves, layers, stacks
from sherd.report.panels import Panel, Run, Section


def sections(runs: Sequence[Run]) -> list[Section]:
    """All plots of these runs. Curves of several runs share a plot; what adds up has one per run, side by side."""
    listed = [
        Section("Learning", "", _there([curves.loss(runs), *curves.figures(runs)])),
        Section("Optimization", "", _there([curves.norm(runs), curves.learning_rate(runs)])),
        Section("Speed", "", _there([curves.throughput(runs), curves.step_time(runs)])),
        Section("Where the time goes", "", _each(runs, stacks.phases_over_time, stacks.phases_by_rank, stacks.waiting)),
        Section(
            "Memory",
            "",
            [*_each(runs, stacks.memory_by_host, stacks.memory_by_rank), *_there([curves.resident(runs)])],
        ),
        Section("Network", "", _there([curves.sent(runs)])),
        Section("Layers", "", _each(runs, layers.norms, layers.update_ratios)),
    ]
    return [section for section in listed if section.panels]


def _there(panels: Sequence[Panel | None]) -> list[Panel]:
    return [panel for panel in panels if panel is not None]


def _each(runs: Sequence[Run], *makers: Callable[[Run], Panel | None]) -> list[Panel]:
    """One plot after the other, each of them for all runs."""
    return _there([make(run) for make in makers for run in runs])
