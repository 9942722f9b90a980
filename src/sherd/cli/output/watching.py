"""Follows the events of a running run: draws them, and writes them to files for other programs.

In its own thread. Nothing here can delay a rank or end a run: a failure is reported in one line, and the run goes on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from sherd.cli.launch.request import Showing
from sherd.cli.messages import say
from sherd.cli.output.console import STDOUT, Console
from sherd.observe.rows import StepRow
from sherd.observe.runs import Follower, RunRecord

LOOK_SECONDS = 0.5
LINE_SECONDS = 10.0  # between two plain lines
CLOSE_SECONDS = 10.0  # for the last events to be written; the rest is left out
EVENTS = "SHERD_EVENTS"
NO_STEP = "warning: no rank recorded a step; does the script call sherd.distribute and step its optimizer?"


class RowWriter(Protocol):
    """Writes steps as they become complete."""

    def write(self, row: StepRow) -> None: ...
    def close(self) -> None: ...


class Display(Protocol):
    """Shows the state of a run."""

    def show(self, record: RunRecord) -> None: ...
    def close(self, record: RunRecord, well: bool) -> None: ...


class Frame:
    """A frame below the output of the ranks, in a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, record: RunRecord) -> None:
        from sherd.cli.output.display import frame

        size = os.get_terminal_size(STDOUT)
        latest = record.steps[-1].t if record.steps else 0.0
        self._console.show(frame(record, size.columns or 80, size.lines or 24), latest=latest)

    def close(self, record: RunRecord, well: bool) -> None:
        if well and record.steps:
            self.show(record)
        # The message about a failure must come last.
        self._console.leave(keep=well and bool(record.steps))


class Lines:
    """A line now and then, for a file, a pipe or a dumb terminal."""

    def __init__(self) -> None:
        self._due = time.monotonic() + LINE_SECONDS
        self._said = -1

    def show(self, record: RunRecord) -> None:
        if time.monotonic() >= self._due and len(record.steps) not in (0, self._said):
            self._say(record)

    def close(self, record: RunRecord, well: bool) -> None:
        # Where it ended, too. After a failure the message about that comes last.
        if (well or self._said < 0) and len(record.steps) not in (0, self._said):
            self._say(record)

    def _say(self, record: RunRecord) -> None:
        from sherd.cli.output.display import figures, in_words

        self._due = time.monotonic() + LINE_SECONDS
        self._said = len(record.steps)
        say(in_words(figures(record, time.time())))


class Watcher:
    """The thread."""

    def __init__(self, follower: Follower, display: Display | None, writers: list[RowWriter]) -> None:
        self.record = RunRecord(follower.directory.name)
        self._follower = follower
        self._display = display
        self._writers = writers
        self._over = threading.Event()
        self._well = True
        self._thread = threading.Thread(target=self._run, name="sherd-launch-watch", daemon=True)
        self._thread.start()

    def close(self, well: bool) -> None:
        """The ranks have ended: read their last events."""
        self._well = well
        self._over.set()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while not self._over.wait(LOOK_SECONDS):
                self._look()
            self._look(last=True)
        except Exception as error:
            with contextlib.suppress(Exception):
                if self._display is not None:
                    self._display.close(self.record, False)
            say(f"warning: the events are no longer drawn or written: {type(error).__name__}: {error}")

    def _look(self, last: bool = False) -> None:
        for event in self._follower.poll():
            self.record.feed(event)
        if last:
            self.record.finish()
        rows = self.record.new_rows()
        for writer in self._writers:
            for row in rows:
                writer.write(row)
            if last:
                writer.close()
        if last and self._well and not self.record.steps:
            say(NO_STEP)
        if self._display is not None and last:
            self._display.close(self.record, self._well)
        elif self._display is not None:
            self._display.show(self.record)


@contextlib.contextmanager
def watched(showing: Showing, console: Console) -> Iterator[Watcher | None]:
    """Have the ranks that are started inside write events, and follow these if the user wants it."""
    with _directory(showing) as directory:
        if directory is None or not showing.needs_events:
            yield None
            return
        display: Display | None = None
        if showing.live:
            drawn = console.is_terminal(STDOUT) and os.environ.get("TERM", "dumb") != "dumb"
            display = Frame(console) if drawn else Lines()
        yield Watcher(Follower(directory, new=True), display, _writers(showing))


def warn_if_nothing(directory: Path) -> None:
    """Nothing has followed these events: warn if there are none."""
    if not any(directory.glob("events-rank*.jsonl")):
        say(NO_STEP)


@contextlib.contextmanager
def _directory(showing: Showing) -> Iterator[Path | None]:
    """The directory for events, which ranks find in their environment; a temporary one if only we read them."""
    if showing.events is not None:
        os.environ[EVENTS] = str(showing.events.absolute())
    if named := os.environ.get(EVENTS):
        yield Path(named)
        return
    if not showing.needs_events:
        yield None
        return
    made = tempfile.mkdtemp(prefix="sherd-events-")
    os.environ[EVENTS] = made
    try:
        yield Path(made)
    finally:
        del os.environ[EVENTS]
        shutil.rmtree(made, ignore_errors=True)


def _writers(showing: Showing) -> list[RowWriter]:
    writers: list[RowWriter] = []
    if showing.csv is not None:
        from sherd.report.csv_file import CsvWriter

        writers.append(CsvWriter(showing.csv))
    if showing.tensorboard is not None:
        from sherd.report.tensorboard import TensorBoardWriter

        writers.append(TensorBoardWriter(showing.tensorboard))
    return writers
