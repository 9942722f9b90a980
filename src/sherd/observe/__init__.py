"""What a run tells: one structured event stream per rank (`sherd.observe.events`), and the process's current one.

observe.use(observe.from_env(rank))              # SHERD_EVENTS=directory turns it on
observe.emit("step", step=3, loss=loss.item())
for event in observe.read(directory): ...
"""

from __future__ import annotations

import os
from typing import Any

from sherd.observe.events import Event, EventStream, NullStream, read, register_kind

__all__ = ["Event", "EventStream", "NullStream", "emit", "from_env", "read", "register_kind", "stream", "use"]

_current = NullStream()


def stream() -> NullStream:
    """The process's current stream: a `NullStream` until `use` sets another."""
    return _current


def use(new: NullStream) -> NullStream:
    """Make `new` the process's current stream; returns the one before, still open."""
    global _current
    before, _current = _current, new
    return before


def emit(kind: str, /, step: int | None = None, **fields: Any) -> None:
    """Record one event on the current stream."""
    _current.emit(kind, step, **fields)


def from_env(rank: int) -> NullStream:
    """An `EventStream` in the directory that SHERD_EVENTS names; a `NullStream` where it names none."""
    directory = os.environ.get("SHERD_EVENTS", "")
    return EventStream(directory, rank) if directory else NullStream()
