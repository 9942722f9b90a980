"""What a run tells: one structured event stream per rank (`sherd.observe.events`), and the process's current one.

observe.use(observe.from_env(rank))              # SHERD_EVENTS=directory turns it on
observe.emit("sample", text="Once upon a time")
for event in observe.read(directory): ...

`phases` and `monitor` have what `step` events are made of. docs/events.md shows every kind of event.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from typing import Any

from sherd.errors import ConfigError
from sherd.observe import monitor
from sherd.observe.events import Event, EventStream, NullStream, read, register_kind
from sherd.observe.monitor import RunMonitor

__all__ = [
    "Event",
    "EventStream",
    "NullStream",
    "begin_anew",
    "emit",
    "expect",
    "expected_steps",
    "finish",
    "from_env",
    "open_early",
    "open_from_env",
    "read",
    "recording",
    "register_kind",
    "start_run",
    "stream",
    "use",
]

_current = NullStream()
_runs = 0  # begun on the current stream and not ended
_expected: int | None = None
_settled = ""  # what SHERD_EVENTS said when a stream was last chosen
_early: int | None = None  # the rank of the current stream, if it was opened before the ranks had met


def stream() -> NullStream:
    """The process's current stream: a `NullStream` until `use` sets another."""
    return _current


def recording() -> bool:
    """Whether events are kept."""
    return type(_current) is not NullStream


def use(new: NullStream) -> NullStream:
    """Make `new` the process's current stream; returns the one before, still open."""
    global _current, _runs, _settled, _early
    before, _current = _current, new
    _runs, _settled, _early = 0, os.environ.get("SHERD_EVENTS", ""), None
    if recording():
        monitor.start()
    else:
        monitor.stop()
    return before


def emit(kind: str, /, step: int | None = None, **fields: Any) -> None:
    """Record one event on the current stream, which is opened if nobody has done so and SHERD_EVENTS names one."""
    open_early()
    _current.emit(kind, step, **fields)


def from_env(rank: int) -> NullStream:
    """An `EventStream` in the directory that SHERD_EVENTS names; a `NullStream` where it names none."""
    directory = os.environ.get("SHERD_EVENTS", "")
    return EventStream(directory, rank) if directory else NullStream()


def open_from_env(rank: int) -> None:
    """Begin to record where SHERD_EVENTS says so and nobody has begun. The ranks have met, and this is `rank`."""
    global _early
    if _early not in (None, rank):  # the launcher's variables, or their absence, told another
        use(NullStream()).close()
    if os.environ.get("SHERD_EVENTS") and not recording():
        use(from_env(rank))
    _early = None


def open_early() -> None:
    """The same before the ranks have met, as the rank that the launcher's variables tell.

    Not in a child process of multiprocessing: that may be a loader's worker, which would write into its parent's file.
    And not where somebody has chosen a stream already, even none.
    """
    global _early
    if type(_current) is not NullStream:
        return
    directory = os.environ.get("SHERD_EVENTS", "")
    if not directory or directory == _settled or multiprocessing.parent_process() is not None:
        return
    rank = os.environ.get("RANK", "")
    use(from_env(int(rank) if rank.isdecimal() else 0))
    _early = int(rank) if rank.isdecimal() else 0


def expect(steps: int) -> None:
    """Say how many steps the run will take in all, for whoever shows how much is left. Not collective."""
    global _expected
    if type(steps) is not int or steps < 1:
        raise ConfigError(f"observe.expect got {steps!r}; write the number of steps, 1 or more")
    _expected = steps
    emit("run.length", steps=steps)


def expected_steps() -> int | None:
    """What `expect` was told last."""
    return _expected


def start_run(**fields: Any) -> None:
    """Record the beginning of a run, of which the end is recorded too."""
    global _runs
    emit("run.start", **fields)
    _runs += 1
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def begin_anew() -> RunMonitor:
    """Another run begins in this process, which counts its steps and its optimizers from 0."""
    global _expected
    _expected = None
    return monitor.start()


def finish(ok: bool) -> None:
    """The run on the current stream is over: close it. Whatever comes now is not recorded."""
    if recording():
        _end(ok)
        use(NullStream()).close()


def _end(ok: bool) -> None:
    global _runs
    if _runs:
        emit("run.end", ok=ok)
    _runs = 0


def _at_exit() -> None:
    # An exception that nobody caught was printed before, and is kept here.
    _end(getattr(sys, "last_value", None) is None)
