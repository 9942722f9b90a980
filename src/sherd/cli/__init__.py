"""The `sherd` command.

`run`, `train`, `report` and `doctor` are the commands. Behind `run`: its `options`, `launch` (from a request to an exit
status), `machines` (how the machines of a run meet), `output` (what the user sees) and `messages`.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from sherd.cli import messages
from sherd.cli.doctor import doctor
from sherd.cli.options import normalised
from sherd.cli.report import report
from sherd.cli.run import run
from sherd.cli.train import train
from sherd.errors import SherdError

BAD_INPUT = 2
INTERRUPTED = 130

# Why our own output cannot be written: nobody reads it, or it goes into a file on a full disk.
_LEFT, _FULL = (errno.EPIPE, errno.EIO), (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Plain text: a box around a one-line error makes it five lines.
app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
# A script's own options come after it, so parsing stops at the first word that is not an option.
app.command(
    short_help="Run a script on several ranks.",
    context_settings={"allow_interspersed_args": False, "token_normalize_func": normalised},
)(run)
app.command(short_help="Show what this machine offers to ranks.")(doctor)
# As with run; the command itself answers an option where the recipe should be.
app.command(
    short_help="Train a recipe and write a report.",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)(train)
app.command(short_help="Plot runs in an HTML file.")(report)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and end the process with its exit status; bad input is one line on stderr, never a traceback."""
    try:
        status = _status(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in (*_LEFT, *_FULL) or error.filename is not None:
            raise
        # Or the interpreter would try again at exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno in _FULL:
            _complain(f"stdout cannot be written: {error.strerror}")
        status = 1
    sys.exit(status)


def _status(arguments: list[str]) -> int:
    try:
        status = app(arguments or ["--help"], prog_name="sherd", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except SherdError as error:
        return _complain(str(error))
    except Exception as error:
        # Errors of the parser. Their class is not public in every release of typer; their method is.
        if not hasattr(error, "format_message"):
            raise
        command = getattr(getattr(error, "ctx", None), "command_path", "sherd")
        return _complain(f"{_worded(error.format_message())} ({command} --help lists the options)")
    return status if isinstance(status, int) else 0


def _worded(message: str) -> str:
    """The parser's suggestions, worded like our own."""
    message = re.sub(r"[.;,]? (?:Did|did) you mean:? (.*?)\??$", r"; did you mean \1?", message)
    found = re.search(r" \(Possible options: (.*)\)$", message)
    if found is None:
        return message
    names = " or ".join(repr(name) for name in found[1].split(", "))
    return f"{message[: found.start()]}; did you mean {names}?"


def _complain(message: str) -> int:
    print(f"sherd{messages.where}: {' '.join(message.split())}", file=sys.stderr)
    return BAD_INPUT


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata  # a third of the time that `sherd --help` takes

        try:
            print(f"sherd {importlib.metadata.version('sherd')}")
        except importlib.metadata.PackageNotFoundError:
            print("sherd (from source, not installed)")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Train PyTorch models on many processes and machines by changing one line."""
