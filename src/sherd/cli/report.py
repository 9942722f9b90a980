"""`sherd report`: parsing and printing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_DEFAULT = "default: RUN/report.html, or sherd-report.html here for several runs"


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of events, one per run.")],
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
    """Draw one or several runs side by side into one HTML file that works without a network."""
    from sherd.report.html import (
        report as write_report,
    )  # takes a while to import, which other commands need not wait for

    print(write_report(runs, output))
