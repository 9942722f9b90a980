"""Ends of ranks in their events, as only the launcher knows them: a rank tells of no kill, nor of `sys.exit(1)`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from sherd.errors import SherdError
from sherd.observe import EventStream


class Endings:
    """Adds the end of a rank that failed to its events, if it has written any since this was made."""

    def __init__(self, ranks: Iterable[int]) -> None:
        directory = os.environ.get("SHERD_EVENTS", "")
        files = {rank: Path(directory) / f"events-rank{rank:05d}.jsonl" for rank in ranks} if directory else {}
        self._before = {rank: (file, _size(file)) for rank, file in files.items()}

    def failed(self, rank: int, how: str) -> None:
        """The rank has ended, and not well. A disk that is full or gone changes nothing about that."""
        file, before = self._before.get(rank, (None, 0))
        if file is None or _size(file) == before:
            return  # what is there is another run's
        with contextlib.suppress(SherdError, OSError):
            stream = EventStream(file.parent, rank)
            stream.emit("run.end", ok=False, how=how)
            stream.close()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
