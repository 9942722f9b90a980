"""One HTML file with everything in it: style, scripts (the page's and plotly's) and data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from sherd.observe.messages import Message, TextSample
from sherd.report.curves import reports_tokens
from sherd.report.panels import Panel, Run, Section
from sherd.report.summary import details, key_figures, state, subtitle
from sherd.report.wording import UNKNOWN, counted, of_ranks

TEXTS_OF_A_RUN = 12


def page(runs: Sequence[Run], sections: Sequence[Section], plotly: str) -> str:
    """The text of the file. `plotly` is plotly's script."""
    panels = [panel for section in sections for panel in section.panels]
    numbers = {id(panel): number for number, panel in enumerate(panels)}
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs side by side"
    body = [
        _header(title, runs),
        _tiles(runs[0]) if len(runs) == 1 else _comparison(runs),
        _messages(runs),
        '<p class="nothing">No step is complete yet.</p>' if not panels else "",
        *[_section(section, numbers, len(runs)) for section in sections],
        _texts(runs),
        _details(runs),
        "<footer>Drag to zoom, double-click to go back. Written by <b>sherd report</b>.</footer>",
    ]
    return _FRAME.format(
        title=escape(f"{title} · sherd report"),
        style=_asset("page.css"),
        body="\n".join(part for part in body if part),
        data=_json([_plot(panel) for panel in panels]),
        plotly=plotly.replace("</script", "<\\/script"),
        script=_asset("page.js"),
    )


# The policy lets the page run its own scripts and fetch nothing.
_FRAME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; \
style-src 'unsafe-inline'; img-src data: blob:; worker-src blob:">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="plots">{data}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def _header(title: str, runs: Sequence[Run]) -> str:
    words = ""
    if len(runs) == 1:
        word, style = state(runs[0].record)
        words = f'<p class="lead">{escape(subtitle(runs[0].record))} <span class="state {style}">{word}</span></p>'
    return (
        '<header><div><p class="brand">sherd report</p>'
        f"<h1>{escape(title)}</h1>{words}</div>"
        '<div class="controls"><div class="choice" role="group" aria-label="horizontal axis">'
        '<button data-axis="steps" aria-pressed="true">Steps</button>'
        '<button data-axis="time" aria-pressed="false">Time</button></div>'
        '<button id="theme" aria-label="light or dark" title="light or dark"></button></div></header>'
    )


def _tiles(run: Run) -> str:
    told = key_figures(run.record, reports_tokens([run]))
    tiles = [f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in told.items()]
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _comparison(runs: Sequence[Run]) -> str:
    figures = [key_figures(run.record, reports_tokens(runs)) for run in runs]
    names = list(dict.fromkeys(name for told in figures for name in told))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = []
    for run, told in zip(runs, figures, strict=True):
        word, style = state(run.record)
        cells = "".join(f"<td>{escape(told.get(name, UNKNOWN))}</td>" for name in names)
        name = f'{_swatch(run)}<b>{escape(run.label)}</b> <span class="state {style}">{word}</span>'
        lines.append(f"<tr><th>{name}<small>{escape(subtitle(run.record))}</small></th>{cells}</tr>")
    return f'<div class="scroll"><table class="runs"><tr><th></th>{head}</tr>{"".join(lines)}</table></div>'


def _section(section: Section, numbers: dict[int, int], runs: int) -> str:
    parts = [_card(panel, numbers[id(panel)], runs) for panel in section.panels]
    style = f"grid of{section.columns}"
    return f'<section><h2>{escape(section.title)}</h2><div class="{style}">{"".join(parts)}</div></section>'


def _card(panel: Panel, number: int, runs: int) -> str:
    owner = (
        f'<span class="owner">{_swatch(panel.run)}{escape(panel.run.label)}</span>' if panel.run and runs > 1 else ""
    )
    switch = ""
    if panel.log:
        switch = f'<button class="log" data-plot="{number}" aria-pressed="false">log</button>'
    note = f"<p>{escape(panel.note)}</p>" if panel.note else ""
    return (
        f'<figure class="{"wide" if panel.wide else ""}"><figcaption><h3>{escape(panel.title)}</h3>{owner}{switch}'
        f'{note}</figcaption><div class="legend" id="legend{number}"></div>'
        f'<div class="plot" id="plot{number}" style="height:{panel.height}px"></div></figure>'
    )


def _swatch(run: Run | None) -> str:
    return f'<i class="swatch" style="background:{run.colour}"></i>' if run else ""


def _messages(runs: Sequence[Run]) -> str:
    items = []
    for run in runs:
        for message, ranks in _grouped(run.record.messages):
            step = f", step {message.step}" if message.step is not None else ""
            owner = f"{_swatch(run)}{escape(run.label)}, " if len(runs) > 1 else ""
            kind = "warning" if message.kind in ("warning", "comm.late") else "error"
            where = f"{owner}{'rank' if len(ranks) == 1 else 'ranks'} {of_ranks(ranks)}{step}"
            items.append(f'<li class="{kind}"><b>{kind}</b> <span>{where}</span><pre>{escape(message.text)}</pre></li>')
    if not items:
        return ""
    return f'<section><h2>Warnings and errors</h2><ul class="messages">{"".join(items)}</ul></section>'


def _grouped(messages: Sequence[Message]) -> list[tuple[Message, list[int]]]:
    """Messages without repetitions, by several ranks or over time."""
    found: dict[tuple[str, str], tuple[Message, list[int]]] = {}
    for message in messages:
        found.setdefault((message.kind, message.text), (message, []))[1].append(message.rank)
    return list(found.values())


def _texts(runs: Sequence[Run]) -> str:
    columns = []
    for run in runs:
        shown: list[TextSample] = run.record.samples[-TEXTS_OF_A_RUN:]
        texts = "".join(
            f"<figure><figcaption><h3>{escape(text.title or 'Sample')}</h3>"
            f"{f'<p>step {text.step:,}</p>' if text.step is not None else ''}</figcaption>"
            f"<pre>{escape(text.text)}</pre></figure>"
            for text in reversed(shown)
        )
        owner = f'<p class="owner">{_swatch(run)}{escape(run.label)}</p>' if len(runs) > 1 else ""
        if texts:
            columns.append(f"<div>{owner}{texts}</div>")
    if not columns:
        return ""
    style = f"texts of{min(len(runs), 3)}"
    return f'<section><h2>Samples</h2><div class="grid {style}">{"".join(columns)}</div></section>'


def _details(runs: Sequence[Run]) -> str:
    columns = []
    for run in runs:
        lines = "".join(f"<dt>{escape(n)}</dt><dd>{escape(text)}</dd>" for n, text in details(run.record).items())
        owner = f'<p class="owner">{_swatch(run)}{escape(run.label)}</p>' if len(runs) > 1 else ""
        columns.append(f'<div class="details">{owner}<dl>{lines}</dl></div>')
    title = "The run" if len(runs) == 1 else f"The {counted(len(runs), 'run')}"
    return f'<section><h2>{title}</h2><div class="grid of{min(len(runs), 3)}">{"".join(columns)}</div></section>'


def _plot(panel: Panel) -> dict[str, Any]:
    return {"data": panel.data, "layout": panel.layout, "timed": panel.timed, "own": panel.run is not None}


def _json(value: Any) -> str:
    # A text that contains "</script>" must not end its element.
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (files("sherd.report") / "assets" / name).read_text(encoding="utf-8")
