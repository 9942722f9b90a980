"""One structured event stream: JSON lines, one file per rank, one schema.

Every line has `v` (version of the schema), `t` (unix seconds), `mono` (monotonic nanoseconds of that host), `rank`,
`kind` and `step` (or null), then the fields of its kind. A kind defines the fields it requires; unknown kinds and
fields are errors even while nothing is written, so that turning events on cannot break a run. Numbers that JSON does
not have are written as the strings "nan", "inf" and "-inf", and read back as numbers.

Metrics, timelines and reports read this stream and nothing else.
"""

from __future__ import annotations

import atexit
import heapq
import json
import math
import mmap
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sherd.errors import ConfigError, Unsupported, nearest

SCHEMA = 1
COMMON = ("v", "t", "mono", "rank", "kind", "step")
_COMMON = frozenset(COMMON)
FLUSH_BYTES = 1 << 16
FLUSH_NS = 1_000_000_000
LARGEST_BITS = 1023
"""The largest integers; larger ones do not fit into a float, which means, rates and plots need."""

_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Event:
    """One line of a stream."""

    v: int
    t: float
    mono: int
    rank: int
    kind: str
    step: int | None
    fields: dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """What an event of one kind must and may carry."""

    name: str
    required: frozenset[str]
    extra: bool  # other fields are allowed
    urgent: bool  # flushed at once: the process may be about to die


_KINDS: dict[str, Kind] = {}


def register_kind(name: str, *required: str, extra: bool = False, urgent: bool = False) -> None:
    """Add a kind of event with the fields it requires; `extra` allows more, `urgent` flushes at once."""
    if name in _KINDS:
        raise ConfigError(f"the event kind {name!r} is already registered; choose another name")
    taken = sorted(set(required) & set(COMMON))
    if taken:
        raise ConfigError(
            f"the event kind {name!r} cannot have its own {taken}: every event has them; rename the field"
        )
    _KINDS[name] = Kind(name, frozenset(required), extra, urgent)


register_kind("run.start", "world", extra=True)
register_kind("run.end", "ok", extra=True, urgent=True)
register_kind("comm.connect", "transport", "world", "hosts")
register_kind("comm.late", "ranks", "call", "seconds", urgent=True)
register_kind("comm.lost", "ranks", "text", urgent=True)
register_kind("comm.diverged", "ranks", "text", urgent=True)
register_kind("warning", "text", extra=True, urgent=True)
register_kind("error", "text", extra=True, urgent=True)
register_kind("step", "loss", extra=True)
register_kind("log", "figures", "n")
register_kind("sample", "text", extra=True)
register_kind("run.length", "steps")
register_kind("map", "name", "items", "chunk", "chunks", "seconds")
register_kind("span", "name", "begin_ns", "end_ns", extra=True)


class NullStream:
    """Checks events and discards them: the default, and the interface of every stream."""

    def emit(self, kind: str, /, step: int | None = None, **fields: Any) -> None:
        """Record one event; `fields` are the kind's own."""
        self._record(_checked(kind, step, fields), step, fields)

    def flush(self) -> None:
        """Write everything emitted so far, so that it survives the death of the process."""

    def close(self) -> None:
        """Flush, and take no more events."""

    def _record(self, kind: Kind, step: int | None, fields: dict[str, Any]) -> None:
        pass


class EventStream(NullStream):
    """Appends the events of one rank to its file in a directory. Threads may share it; forked children do not write."""

    def __init__(self, directory: str | os.PathLike[str], rank: int) -> None:
        if type(rank) is not int or rank < 0:
            raise ConfigError(f"EventStream: rank={rank!r} must be a non-negative int")
        self.path = Path(directory) / f"events-rank{rank:05d}.jsonl"
        self.rank = rank
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._size = 0
        self._limit = FLUSH_BYTES
        self._due = time.monotonic_ns() + FLUSH_NS
        self._pid = os.getpid()
        self._file: int | None = _open(self.path)
        atexit.register(self._at_exit)

    def flush(self) -> None:
        if os.getpid() == self._pid:
            with self._lock:
                self._write()

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._write()
            if self._file is not None:
                os.close(self._file)
            self._file = None
        atexit.unregister(self._at_exit)

    def _record(self, kind: Kind, step: int | None, fields: dict[str, Any]) -> None:
        # A forked child has a copy of the buffer, and of a lock that another thread may have held: it must touch
        # neither.
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._file is None:
                raise ConfigError(
                    f"emit({kind.name!r}) was called after {self.path.name} was closed; close the stream last"
                )
            # Stamped under the lock, so that a file's lines are in the order of their clocks.
            now = time.monotonic_ns()
            common = {"v": SCHEMA, "t": time.time(), "mono": now, "rank": self.rank, "kind": kind.name, "step": step}
            line = _encode(common | fields)
            self._lines.append(line)
            self._size += len(line)
            if kind.urgent or self._size >= self._limit or now >= self._due:
                self._write()

    def _write(self) -> None:
        data, self._lines, self._size = b"".join(self._lines), [], 0
        self._due = time.monotonic_ns() + FLUSH_NS
        try:
            # One write() of whole lines: once it returns, the kernel has them, and a kill cannot lose them.
            while data and self._file is not None:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            # A full disk must not end a training run, but must be reported.
            warnings.warn(f"events of rank {self.rank} are being lost: {self.path}: {error.strerror}", stacklevel=4)

    def _at_exit(self) -> None:
        # Other exit handlers may still emit: write their events at once instead of refusing them.
        self._limit = 0
        self.flush()


def read(path: str | os.PathLike[str]) -> Iterator[Event]:
    """The events of a file, or of all ranks of a directory merged by time; an incomplete last line is left out."""
    path = Path(path)
    files = sorted(path.glob("events-rank*.jsonl")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise ConfigError(f"no events in {path}: expected a directory with events-rank00000.jsonl, or such a file")
    return heapq.merge(*map(_read_file, files), key=lambda event: (event.t, event.rank))


def _checked(name: str, step: object, fields: Iterable[str]) -> Kind:
    kind = _KINDS.get(name)
    if kind is None:
        raise ConfigError(f"unknown event kind {name!r}; {nearest(name, _KINDS)}")
    if step is not None and type(step) is not int:
        raise ConfigError(f"event {name!r}: step={step!r} must be an int or None")
    given = set(fields)
    if given >= kind.required and not (given & _COMMON if kind.extra else given - kind.required):
        return kind
    if missing := sorted(kind.required - given):
        raise ConfigError(f"event {name!r} lacks {missing}; it requires {sorted(kind.required)}")
    surplus = given & _COMMON if kind.extra else given - kind.required
    for field in sorted(surplus):
        raise ConfigError(f"event {name!r} cannot take the field {field!r}; {nearest(field, kind.required)}")
    return kind


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write events to {path}: {error.strerror}; name a directory you can write") from None
    _cut_torn_line(file)
    return file


def _cut_torn_line(file: int) -> None:
    """Drop an incomplete last line of a killed process, so that ours does not continue it."""
    size = os.fstat(file).st_size
    if size:  # an empty file cannot be mapped
        with mmap.mmap(file, size, access=mmap.ACCESS_READ) as data:
            whole = data.rfind(b"\n") + 1
        os.ftruncate(file, whole)


def _encode(line: dict[str, Any]) -> bytes:
    try:
        try:
            text = _ENCODER.encode(line)
        except ValueError:  # a number that JSON does not have: rare, and slow to find
            text = _ENCODER.encode(_leaves(line, _to_json))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"event {line['kind']!r}: {error}; give plain numbers, such as loss.item()") from None
    return text.encode() + b"\n"


def _leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _leaves(item, change) for key, item in value.items()}
    return [_leaves(item, change) for item in value] if isinstance(value, (list, tuple)) else change(value)


def _to_json(value: Any) -> Any:
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(value: Any) -> Any:
    if type(value) is int and value.bit_length() > LARGEST_BITS:
        return math.inf if value > 0 else -math.inf
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def parse(line: bytes) -> Event | None:
    """The event of one line; None if it is not one."""
    try:
        fields = _leaves(json.loads(line), _from_json)
        event = Event(**{name: fields.pop(name) for name in COMMON}, fields=fields)
    except (ValueError, AttributeError, KeyError, TypeError):
        return None
    right = isinstance(event.v, int) and isinstance(event.t, (int, float)) and isinstance(event.rank, int)
    right = right and (event.step is None or isinstance(event.step, int))
    return event if right else None


def _read_file(path: Path) -> Iterator[Event]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            event = parse(line)
            if event is None:
                if not line.endswith(b"\n"):
                    return  # the rank was killed while writing it
                raise ConfigError(f"{path}, line {number}: not a sherd event: {line[:80]!r}")
            if event.v > SCHEMA:
                found = f"{path}, line {number}: event schema {event.v}"
                raise Unsupported(f"{found} is newer than {SCHEMA}, the newest this sherd reads; upgrade sherd")
            yield event
