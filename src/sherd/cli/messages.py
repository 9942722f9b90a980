"""The launcher's messages to the user, all on stderr."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from sherd.cli.words import ranks_in_words

if TYPE_CHECKING:
    from sherd.cli.launch.ranks import Ended

_line: Callable[[str], None] | None = None  # writes a line, while the ranks' output passes through this process


where = ""  # the machine, where it has to be named
_name = "sherd run"


def say(text: str) -> None:
    _write(f"{_name}: {text}")


def speak_as(label: str) -> None:
    """Name this machine in messages, where those of several machines appear together."""
    global _name, where
    where = f" on {label}" if label else ""
    _name = f"sherd run{where}"


@contextlib.contextmanager
def said_by(line: Callable[[str], None]) -> Iterator[None]:
    """Inside, this function writes the lines: it knows what else is on the terminal."""
    global _line
    _line = line
    try:
        yield
    finally:
        _line = None


def _write(text: str) -> None:
    if _line is not None:
        _line(text)
    else:
        print(text, file=sys.stderr, flush=True)


def say_failed(cause: Ended) -> None:
    """Report which rank of this machine failed first, at once: stopping the others may take a while."""
    where = "" if cause.traceback or cause.code < 0 or not cause.wrote else "; see its output above"
    say(f"rank {cause.rank} failed first (pid {cause.pid}): {_ending(cause.code)}{where}")
    if cause.traceback:
        _write(cause.traceback)


def conclude(failed: Sequence[Ended], *, ours: bool) -> int:
    """Report how the other ranks ended after the first failure, here (`ours`) or elsewhere; the exit status."""
    endings: dict[str, list[int]] = {}
    for one in failed[1:] if ours else failed:
        endings.setdefault(_ending(one.code), []).append(one.rank)
    for ending, ranks in endings.items():
        say(f"after it, {ranks_in_words(ranks)}: {ending}")
    if not ours or not failed:
        return 0 if ours else 1
    return failed[0].code if failed[0].code > 0 else 128 - failed[0].code


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    if code == -signal.SIGKILL:
        return "killed by SIGKILL, perhaps by the kernel because memory ran out"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"ended by signal {-code}"
