"""What a run records: one structured event stream per rank (`sherd.observe.events`), and the process's current one.

observe.use(observe.from_env(rank))              # SHERD_EVENTS=directory turns it on
observe.emit("sample", text="Once upon a time")
for event in observe.read(directory): ...

`phases` and `monitor` measure what `step` events contain. docs/events.md shows every kind of event.
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
_runs = 0  # started on the current stream and not ended
_expected: int | None = None
_settled = ""  # the value of SHERD_EVENTS when a stream was last chosen
_early: int | None = None  # the rank of the current stream, if it was opened before the ranks connected


def stream() -> NullStream:
    """The process's current stream: a `NullStream` until `use` sets another."""
    return _current


def recording() -> bool:
    """Whether events are kept."""
    return type(_current) is not NullStream


def use(new: NullStream) -> NullStream:
    """Make `new` the process's current stream; returns the previous one, still open."""
    global _current, _runs, _settled, _early
    before, _current = _current, new
    _runs, _settled, _early = 0, os.environ.get("SHERD_EVENTS", ""), None
    if recording():
        monitor.start()
    else:
        monitor.stop()
    return before


def emit(kind: str, /, step: int | None = None, **fields: Any) -> None:
    """Record one event on the current stream, which is opened first if SHERD_EVENTS asks for it."""
    open_early()
    _current.emit(kind, step, **fields)


def from_env(rank: int) -> NullStream:
    """An `EventStream` in the directory that SHERD_EVENTS names; a `NullStream` if it is not set."""
    directory = os.environ.get("SHERD_EVENTS", "")
    return EventStream(directory, rank) if directory else NullStream()


def open_from_env(rank: int) -> None:
    """Start recording if SHERD_EVENTS is set and nothing records yet. The ranks are connected, and this is `rank`."""
    global _early
    if _early not in (None, rank):  # the launcher's variables, or their absence, gave another one
        use(NullStream()).close()
    if os.environ.get("SHERD_EVENTS") and not recording():
        use(from_env(rank))
    _early = None


def open_early() -> None:
    """The same before the ranks are connected, with the rank from the launcher's variables.

    Not in a child process of multiprocessing: that may be a loader's worker, which would write to its parent's file.
    And not if a stream, or none, was already chosen.
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
    """Set how many steps the run will take in total, so that displays can show how much is left. Not collective."""
    global _expected
    if type(steps) is not int or steps < 1:
        raise ConfigError(f"observe.expect got {steps!r}; write the number of steps, 1 or more")
    _expected = steps
    emit("run.length", steps=steps)


def expected_steps() -> int | None:
    """The last value passed to `expect`."""
    return _expected


def start_run(**fields: Any) -> None:
    """Record the start of a run; its end will be recorded too."""
    global _runs
    emit("run.start", **fields)
    _runs += 1
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def begin_anew() -> RunMonitor:
    """Begin another run in this process, with steps and optimizers counted from 0."""
    global _expected
    _expected = None
    return monitor.start()


def finish(ok: bool) -> None:
    """End the run on the current stream and close it. Nothing is recorded afterwards."""
    if recording():
        _end(ok)
        use(NullStream()).close()


def _end(ok: bool) -> None:
    global _runs
    if _runs:
        emit("run.end", ok=ok)
    _runs = 0


def _at_exit() -> None:
    # Python has printed an uncaught exception before this, and keeps it here.
    _end(getattr(sys, "last_value", None) is None)
