"""`sherd report`: runs in one HTML file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sherd.errors import ConfigError, Unsupported
from sherd.observe.runs import RunRecord, load
from sherd.report.figures import sections
from sherd.report.page import page
from sherd.report.panels import runs_of

NAME = "report.html"
NAME_OF_SEVERAL = "sherd-report.html"


def report(paths: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str] | None = None) -> Path:
    """Write the page of one or several directories of events; returns its path.

    Without `output` it is `report.html` in the directory of the run, and `sherd-report.html` here for several.
    """
    plotly = _plotly()
    folders = [Path(path) for path in paths]
    if not folders:
        raise ConfigError("no run was given; write the directory of its events")
    for number, folder in enumerate(folders):
        if folder.resolve() in [before.resolve() for before in folders[:number]]:
            raise ConfigError(f"the run {folder} is given twice; write each run once")
    records = [load(folder) for folder in folders]
    if output is None:
        first = folders[0] if folders[0].is_dir() else folders[0].parent
        output = first / NAME if len(folders) == 1 else Path(NAME_OF_SEVERAL)
    return write(records, labels(folders), Path(output), plotly)


def write(records: Sequence[RunRecord], names: Sequence[str], output: Path, plotly: str | None = None) -> Path:
    """Write the page of these records."""
    runs = runs_of(records, names)
    text = page(runs, sections(runs), plotly or _plotly())
    if output.is_dir():
        raise ConfigError(f"cannot write {output}: it is a directory; name a file, such as {output / NAME}")
    # Written to another file and moved, so that nobody opens half a page.
    part = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(output)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}; name another file with -o") from None
    return output


def labels(folders: Sequence[Path]) -> list[str]:
    """Each folder's name, with as many parents as needed to make them unique."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise Unsupported("a report needs plotly: pip install 'sherd[report]'") from None
    return str(get_plotlyjs())
