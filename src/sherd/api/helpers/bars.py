"""Progress of a loop: a bar on a terminal, a line now and then elsewhere; on rank 0 only."""

from __future__ import annotations

import math
import operator
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, SupportsIndex, TypeVar

from sherd import observe
from sherd.api.helpers.process import distribution, is_main
from sherd.data.loader import trains
from sherd.errors import ConfigError
from sherd.observe import monitor

T = TypeVar("T")

LINE_EVERY = 10.0  # seconds
clock = time.monotonic

_loops: list[Loop] = []  # running now, the outermost first
_line_at = -math.inf  # when any loop last wrote a line
_display: Any = None  # the bars of all loops: a terminal has room for one


def progress(iterable: Iterable[T], total: SupportsIndex | None = None, desc: str = "") -> Progress[T]:
    """Iterate over `iterable` and show progress on rank 0: a bar with the rate and the time left. Not collective.

        for x, y in sherd.progress(loader, desc="epoch 1"):

    `total` defaults to `len(iterable)`, if it has a length. The bar is on stderr; if that is not a terminal, a line
    every 10 seconds. Loops may be nested. Around a distributed training loader, it also records in the run's events how
    many steps there will be; in all epochs, if an outer `sherd.progress` counts these.
    """
    if not isinstance(iterable, Iterable):
        raise ConfigError(f"sherd.progress got a {type(iterable).__name__}; write something to loop over")
    return Progress(iterable, _length(iterable) if total is None else _whole(total), desc)


class Progress(Generic[T]):
    """An iterable that shows its progress."""

    def __init__(self, iterable: Iterable[T], total: int | None, desc: str) -> None:
        self._iterable = iterable
        self._total = total
        self._desc = desc

    def __len__(self) -> int:
        if self._total is None:
            raise TypeError(f"a {type(self._iterable).__name__} has no length; write sherd.progress(..., total=...)")
        return self._total

    def __iter__(self) -> Iterator[T]:
        iterator = iter(self._iterable)  # first: a loader forks workers, which must not inherit a live display
        loop = Loop(self._total, self._desc)
        if self._total and trains(self._iterable):
            _expect(self._total)
        loop.open()
        try:
            for item in iterator:
                yield item
                loop.advance()
        finally:  # also if the loop is left early
            loop.close()


class Loop:
    """A loop that is running."""

    def __init__(self, total: int | None, desc: str) -> None:
        self.total = total
        self.done = 0
        self._desc = desc
        self._began = clock()
        self._task: Any = None  # its bar

    def open(self) -> None:
        global _display
        if is_main() and _is_terminal():
            if _display is None:
                _display = _new_display()
                _display.start()
            self._task = _display.add_task(self._desc, total=self.total)
        _loops.append(self)

    def advance(self, count: int = 1) -> None:
        self.done += count
        if self._task is not None:
            _display.advance(self._task, count)
        elif is_main() and sys.stderr is not None and not _is_terminal():
            self._write()

    def close(self) -> None:
        global _display
        if self in _loops:
            _loops.remove(self)
        task, self._task = self._task, None
        if task is not None and any(loop._task is not None for loop in _loops):
            _display.remove_task(task)
        elif task is not None:  # the outermost stays visible
            _display.stop()
            _display = None

    def text(self) -> str:
        """`epoch 1: 120 of 500, 24%, 35.2/s, 11 s left`."""
        rate = self.done / max(clock() - self._began, 1e-9)
        parts = [f"{self.done}"]
        if self.total:
            parts = [f"{self.done} of {self.total}", f"{self.done / self.total:.0%}"]
        parts.append(_rate(rate))
        if self.total and self.total > self.done:
            parts.append(f"{_duration((self.total - self.done) / rate)} left")
        return ": ".join(filter(None, [self._desc, ", ".join(parts)]))

    def _write(self) -> None:
        """A line, unless this loop or an outer one has just begun, or one was written a moment ago."""
        global _line_at
        now = clock()
        if now - max(_line_at, _loops[0]._began) >= LINE_EVERY:
            _line_at = now
            print(self.text(), file=sys.stderr, flush=True)


def _new_display() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            speed = task.finished_speed or task.speed
            return Text(_rate(speed) if speed else "")

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TimeRemainingColumn(),
    )
    # What is printed scrolls above the bar, unless stdout goes elsewhere.
    to_terminal = sys.stdout is not None and sys.stdout.isatty()
    return Progress(*columns, console=Console(file=sys.stderr), redirect_stdout=to_terminal)


def _expect(total: int) -> None:
    """Record how many steps there will be."""
    run, there = monitor.current, distribution()
    if run is None:
        return
    epochs = 1
    if _loops and (around := _loops[-1]).total:
        epochs = max(around.total - around.done, 1)
    accumulate = 1 if there is None else there[1]
    observe.expect(run.steps + max(epochs * total // accumulate, 1))


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _whole(total: SupportsIndex) -> int:
    try:
        found = operator.index(total)
    except TypeError:
        found = -1
    if found < 0:
        raise ConfigError(f"sherd.progress got total={total!r}; write how many items there are, or leave it out")
    return found


def _length(iterable: object) -> int | None:
    try:
        return len(iterable) if isinstance(iterable, Sized) else None
    except (TypeError, NotImplementedError):  # a loader of a stream
        return None


def _rate(per_second: float) -> str:
    return f"{per_second:.1f}/s" if per_second >= 1 or not per_second else f"{1 / per_second:.1f} s each"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {whole % 60:02} s"
