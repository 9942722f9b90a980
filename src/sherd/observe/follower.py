"""Tails the event files of a running run."""

from __future__ import annotations

import os
from pathlib import Path

from sherd.observe.events import Event, parse


class Follower:
    """Reads what was added to a directory's events since the last poll, new files included.

    With `new`, what is already in the directory is skipped: it belongs to earlier runs.
    """

    def __init__(self, directory: str | os.PathLike[str], new: bool = False) -> None:
        self.directory = Path(directory)
        self._offsets: dict[Path, int] = {}
        if new:
            self._offsets = {path: path.read_bytes().rfind(b"\n") + 1 for path in self._files()}

    def poll(self) -> list[Event]:
        """New events of all ranks, merged by time. A line that is still being written waits for the next poll."""
        events = [event for path in self._files() for event in self._added(path)]
        return sorted(events, key=lambda event: (event.t, event.rank))

    def _files(self) -> list[Path]:
        return sorted(self.directory.glob("events-rank*.jsonl"))

    def _added(self, path: Path) -> list[Event]:
        try:
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < offset:  # truncated or replaced
                    offset = 0
                file.seek(offset)
                data = file.read()
        except OSError:
            return []  # removed in the meantime
        whole = data.rfind(b"\n") + 1
        self._offsets[path] = offset + whole
        # Watching a run must not end it: lines that are not events are skipped here; `load` reports them.
        parsed = (parse(line) for line in data[:whole].split(b"\n"))
        return [event for event in parsed if event is not None]
