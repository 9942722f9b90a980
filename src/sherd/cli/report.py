"""The command `sherd report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_DEFAULT = "default: RUN/report.html, or sherd-report.html here for several runs"


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories with events, one per run.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help=f"Where to write; {_DEFAULT}.",
        ),
    ] = None,
) -> None:
    """Plot one run, or several side by side, in one HTML file that works offline."""
    from sherd.report.html import (
        report as write_report,
    )  # takes a while to import, which other commands need not wait for

    print(write_report(runs, output))
