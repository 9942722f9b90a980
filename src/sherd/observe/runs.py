"""What is known of a run, merged from the events of its ranks; reports, writers and displays read it from here.

record = load(directory)                         # a finished run, or as far as it got
record.steps[-1].loss, record.start["strategy"]

follower, record = Follower(directory), RunRecord("mine")
for event in follower.poll(): record.feed(event) # repeatedly, while it runs
for row in record.new_rows(): ...                # what has become complete since the last call

A directory may hold several runs in sequence: a restarted job appends to the same files. The record is of the last
one. A rank begins a new run with a `run.start` that comes from another process, after its `run.end` or after steps
(several `distribute` calls before the first step are one run; one after steps begins another, as in a sweep). Later
events of other ranks that belong to the previous run are ignored.

A step is complete when all ranks have reported it, except those that have ended, were reported lost, or have reported a
later step. Figures of `sherd.log` belong to the step that their event names; those logged after it, such as held-out
figures, are added to its row before the next row becomes complete; those of a step that the run did not finish are
`unfinished`. With several optimizers, the table has the steps of the one that took the first. Events of unknown kinds
are ignored.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sherd.errors import ConfigError
from sherd.observe.events import Event, read
from sherd.observe.follower import Follower
from sherd.observe.hosts import Host, hosts_of
from sherd.observe.means import LogEntry, averaged, tokens_of
from sherd.observe.messages import MESSAGES, Message, TextSample, text_of
from sherd.observe.rows import PHASES, LayerFigures, StepRow, StepTable, merge

__all__ = [
    "PHASES",
    "Follower",
    "Host",
    "LayerFigures",
    "Message",
    "RunRecord",
    "StepRow",
    "StepTable",
    "TextSample",
    "load",
]


@dataclass
class _Pending:
    """A step that some ranks have not reported yet."""

    step: int
    number: int
    t: float = 0.0
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass
class _Rank:
    """What one rank has reported so far."""

    pid: object = None
    started: bool = False
    gone: bool = False
    last: int = -1  # number of the last step that it reported, in the order of the run
    steps: int = 0


class RunRecord:
    """What is known of one run so far. `ranks`: those whose events can arrive, if not all (one machine of several)."""

    def __init__(self, name: str = "", ranks: Iterable[int] | None = None) -> None:
        self.name = name
        self._expected = None if ranks is None else frozenset(ranks)
        self._begin()

    def _begin(self) -> None:
        self.start: dict[str, Any] | None = None
        self.starts: dict[int, dict[str, Any]] = {}
        self.start_time: float | None = None
        self.end_time: float | None = None
        self.steps = StepTable()
        self.unfinished: dict[str, float] = {}
        self.samples: list[TextSample] = []
        self.messages: list[Message] = []
        self.connection: dict[str, Any] | None = None
        self.ok: bool | None = None
        self._ranks: dict[int, _Rank] = defaultdict(_Rank)
        self._optimizer: int | None = None
        self._pending: dict[int, _Pending] = {}  # by step
        self._numbered = 0
        self._rows: dict[int, StepRow] = {}  # by step
        self._logs: dict[int, list[LogEntry]] = {}  # by step: future ones and the newest row
        self._length: int | None = None
        self._taken = 0
        self._hosts: list[Host] | None = None

    @property
    def world(self) -> int:
        """Ranks of the run: from its start event, else as many as have appeared."""
        told = self.start or next(iter(self.starts.values()), None) or self.connection
        return int(told["world"]) if told else max(self._ranks, default=-1) + 1

    @property
    def hosts(self) -> list[Host]:
        """The machines of the run. Without a start event, all ranks count as on one."""
        if self._hosts is None:
            self._hosts = hosts_of(self.starts, self.start or self.connection or {}, self.world)
        return self._hosts

    @property
    def ranks(self) -> list[int]:
        """Ranks with any event."""
        return sorted(self._ranks)

    @property
    def total_steps(self) -> int | None:
        """How many steps the run will take, if known."""
        return self._length or (self.start or {}).get("total_steps")

    @property
    def ended(self) -> bool:
        """Whether every rank has ended, or is lost."""
        waited = self._waited_for()
        return bool(self._ranks) and all(rank in self._ranks and self._ranks[rank].gone for rank in waited)

    def feed(self, event: Event) -> None:
        """Add the next event. Those of one rank come in order; ranks may lag behind each other."""
        if event.kind == "run.start":
            self._on_start(event)
        rank = self._ranks[event.rank]
        if self._late_for_run(rank, event):
            return
        self.end_time = max(event.t, self.end_time or event.t)
        if event.kind == "step":
            self._on_step(rank, event)
        elif event.kind == "log":
            self._on_log(rank, event)
        elif event.kind == "sample":
            # A text may be "nan", which reading turns into a number.
            title, text = (str(event.fields.get(name) or "") for name in ("title", "text"))
            self.samples.append(TextSample(event.step, event.t, event.rank, title, text))
        elif event.kind == "comm.connect":
            self.connection = self.connection or event.fields  # groups of ranks may connect later
            self._hosts = None
        elif event.kind == "run.length":
            self._length = event.fields["steps"]
        elif event.kind == "run.end":
            rank.gone = True
            self.ok = bool(event.fields["ok"]) and self.ok is not False
            self._complete()
        elif event.kind in MESSAGES:
            self._on_message(event)

    def new_rows(self) -> list[StepRow]:
        """Steps that have become complete since the last call."""
        rows = self.steps[self._taken :]
        self._taken = len(self.steps)
        return rows

    def finish(self) -> None:
        """No more events will come: steps that only some ranks reported become rows of those ranks."""
        for pending in self._pending.values():
            self._append(pending)
        self._pending.clear()
        left = [entry for step, entries in self._logs.items() if step not in self._rows for entry in entries]
        self._logs.clear()
        self.unfinished = averaged(left)

    def _on_start(self, event: Event) -> None:
        rank = self._ranks[event.rank]
        pid = event.fields.get("pid")
        if rank.started and (rank.pid != pid or rank.gone or rank.last >= 0):
            self._begin()
            rank = self._ranks[event.rank]
        rank.started, rank.pid = True, pid
        self.starts.setdefault(event.rank, event.fields)
        if event.rank == 0 and self.start is None:
            self.start = event.fields
        self.start_time = min(event.t, self.start_time or event.t)
        self._hosts = None

    def _late_for_run(self, rank: _Rank, event: Event) -> bool:
        """Whether this belongs to the previous run: its rank has not started in this one yet."""
        if rank.started or not self.starts:
            return False
        return event.kind not in MESSAGES or event.t < (self.start_time or 0)

    def _on_step(self, rank: _Rank, event: Event) -> None:
        optimizer = event.fields.get("optimizer") or 0
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer != self._optimizer:
            return
        step = event.step if event.step is not None else rank.steps
        rank.steps += 1
        if step in self._rows:
            return  # already complete without this rank
        if step not in self._pending:
            self._pending[step] = _Pending(step, self._numbered)
            self._numbered += 1
        pending = self._pending[step]
        pending.reports[event.rank] = event.fields
        pending.t = max(pending.t, event.t)
        rank.last = max(rank.last, pending.number)
        self._complete()

    def _on_log(self, rank: _Rank, event: Event) -> None:
        figures = {name: value for name, value in event.fields["figures"].items() if value is not None}
        entry = LogEntry(figures, 1 if event.fields.get("n") is None else event.fields["n"])
        step = event.step if event.step is not None else rank.steps
        self._logs.setdefault(step, []).append(entry)
        if step in self._rows:
            self._add_logs(self._rows[step])

    def _on_message(self, event: Event) -> None:
        self.messages.append(Message(event.kind, event.t, event.rank, event.step, text_of(event)))
        if event.kind == "comm.lost":
            for rank in event.fields["ranks"]:
                self._ranks[rank].gone = True
            self._complete()

    def _waited_for(self) -> Iterable[int]:
        return range(self.world) if self._expected is None else self._expected

    def _complete(self) -> None:
        if not (self.starts or self.connection):
            return  # the number of ranks is unknown
        while self._pending:
            first = next(iter(self._pending.values()))
            for number in self._waited_for():
                rank = self._ranks.get(number)
                if number not in first.reports and (rank is None or not (rank.gone or rank.last > first.number)):
                    return
            del self._pending[first.step]
            self._append(first)

    def _append(self, pending: _Pending) -> None:
        row = merge(pending.step, pending.t, pending.reports, self.world, self.hosts)
        self._add_logs(row)
        if self.steps:
            self._logs.pop(self.steps[-1].step, None)
        self.steps.append(row)
        self._rows[row.step] = row

    def _add_logs(self, row: StepRow) -> None:
        logs = self._logs.get(row.step, ())
        row.figures.update(averaged(logs))
        row.tokens = tokens_of(logs)


def load(path: str | os.PathLike[str]) -> RunRecord:
    """The run in a directory of events; the last one of several. An incomplete last line is left out."""
    path = Path(path)
    record = RunRecord(path.resolve().name)
    try:
        for event in read(path):
            record.feed(event)
    except OSError as error:
        raise ConfigError(f"cannot read the events of {path}: {error.strerror}") from None
    if not record.ranks:
        raise ConfigError(f"no events in {path}: its files are empty; did the run start with SHERD_EVENTS={path}?")
    # In a run that is still going, incomplete steps stay out: their norms would be too small.
    silent = set(range(record.world)) - set(record.starts)
    if silent or any(rank.gone for rank in record._ranks.values()):
        record.finish()
    return record
