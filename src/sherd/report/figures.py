"""The plots of a page, in the order of its sections. Plots without data and empty sections are left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sherd.report import curves, layers, stacks
from sherd.report.panels import Panel, Run, Section, byte_ticks

MOST_COLUMNS = 3


def sections(runs: Sequence[Run]) -> list[Section]:
    """All plots of these runs. Curves of several runs share a plot; stacked quantities have one per run."""
    columns = min(max(len(runs), 2), MOST_COLUMNS) if len(runs) != 4 else 2
    time = _each(runs, stacks.phases_over_time, stacks.phases_by_rank, stacks.waiting)
    memory = _each(runs, stacks.memory_by_host, stacks.memory_by_rank)
    listed = [
        Section("Learning", _there([curves.loss(runs), *curves.figures(runs)])),
        Section("Optimization", _there([curves.norm(runs), curves.distance(runs), curves.learning_rate(runs)])),
        Section("Speed", _there([curves.throughput(runs), curves.step_time(runs)])),
        Section("Where the time goes", [_widened(time[0]), *time[1:]] if len(runs) == 1 and time else time, columns),
        Section("Memory", [*memory, *map(_widened, _there([curves.resident(runs)]))], columns),
        Section("Communication", _there([curves.sent(runs)])),
        Section("Layers", _each(runs, layers.norms, layers.update_ratios), columns),
    ]
    return [_filled(section) for section in listed if section.panels]


def _widened(panel: Panel) -> Panel:
    return replace(panel, wide=True)


def _filled(section: Section) -> Section:
    """Without a gap in the last row: a plot that would be alone in it takes the full width."""
    narrow = [panel for panel in section.panels if not panel.wide]
    if len(narrow) % section.columns != 1 or section.panels[-1].wide:
        return section
    return replace(section, panels=[*section.panels[:-1], _widened(section.panels[-1])])


def _there(panels: Sequence[Panel | None]) -> list[Panel]:
    return [panel for panel in panels if panel is not None]


def _each(runs: Sequence[Run], *makers: Callable[[Run], Panel | None]) -> list[Panel]:
    """Plot by plot, each for all runs."""
    return [panel for make in makers for panel in _comparable(_there([make(run) for run in runs]))]


def _comparable(panels: list[Panel]) -> list[Panel]:
    """The same plot of several runs on the same scale, so that lengths can be compared."""
    tops = [panel.top for panel in panels if panel.top]
    if len(tops) < 2:
        return panels
    for panel in panels:
        ticks = byte_ticks(max(tops)) if panel.in_bytes else {}
        panel.layout[panel.numbers] |= {"range": [0, max(tops)], **ticks}
    return panels
