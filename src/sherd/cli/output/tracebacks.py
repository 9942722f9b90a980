"""Showing one traceback, or one last message, for several ranks that failed in the same way.

A traceback on a rank's stderr is held back until it is complete. If another rank has shown the same exception, except
for numbers of ranks and processes and for addresses, it is only counted, and a line says so later. Other lines are held
back for a moment if another rank has shown the same: if the rank fails now, it has failed as that one did.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sherd.cli.words import ranks_in_words

QUIET_SECONDS = 0.3  # without another line, a traceback is complete
NOTE_SECONDS = 1.0  # for other ranks to show the same one, before the count is shown
MOST_BYTES = 1 << 16
MOST_LINES = 256  # of other ranks to compare a line with

# torch's own hook writes "[rank1]: " before every line.
_OWN_PREFIX = re.compile(rb"^\[rank\d+\]:[ ]?")
_BEGIN = re.compile(rb"(?:\[rank\d+\]:[ ]?)?Traceback \(most recent call last\):")
_FRAME = re.compile(rb"\s|$")
_DIFFERS = re.compile(rb"0x[0-9a-f]+|(?i:\b(ranks?|pid|process|port)\W{0,3}\d+(?:(?:, |-| and )\d+)*)|:\d{4,5}\b")

Print = Callable[[int, Sequence[bytes]], None]  # a rank, and lines of its stderr


@dataclass
class Shown:
    """An exception that one rank has shown."""

    rank: int
    others: set[int] = field(default_factory=set)
    when: float = field(default_factory=time.monotonic)


class Tracebacks:
    """The tracebacks of all ranks of this machine."""

    def __init__(self, show: Print, say: Callable[[str], None]) -> None:
        self.interrupted = False  # by ^C: every rank then ends somewhere else, and the first traceback is enough
        self._show = show
        self._say = say
        self._held: dict[int, list[bytes]] = {}
        self._last: dict[int, float] = {}  # when a rank with held-back lines last wrote
        self._shown: dict[bytes, Shown] = {}
        self._echoes: dict[int, list[bytes]] = {}  # lines held back because another rank has shown the first of them
        self._lines: dict[bytes, int] = {}  # lines shown recently, and the first rank that showed each

    def take(self, rank: int, pieces: Sequence[bytes]) -> None:
        """Lines of a rank's stderr: shown, or held back."""
        for piece in pieces:
            held = self._held.get(rank)
            if held is None and not _BEGIN.match(piece):
                self._take_line(rank, piece)
                continue
            self._release_echo(rank)
            held = self._held.setdefault(rank, [])
            held.append(piece)
            self._last[rank] = time.monotonic()
            if sum(map(len, held)) > MOST_BYTES:
                self.release(rank)

    def _take_line(self, rank: int, piece: bytes) -> None:
        key = _key(piece)
        if rank not in self._echoes:
            if not (piece.endswith(b"\n") and key and self._lines.get(key, rank) != rank):
                self._show_lines(rank, [piece])
                return
            self._echoes[rank] = []
        self._echoes[rank].append(piece)
        self._last[rank] = time.monotonic()
        if sum(map(len, self._echoes[rank])) > MOST_BYTES:
            self._release_echo(rank)

    def _release_echo(self, rank: int, failed: bool = False) -> None:
        lines = self._echoes.pop(rank, [])
        keys = [key for line in lines if (key := _key(line))]
        others = {self._lines.get(key, rank) for key in keys}
        if failed and keys and rank not in others:
            whole = b"\n".join(keys)
            self._shown.setdefault(whole, Shown(min(others))).others.add(rank)
        else:
            self._show_lines(rank, lines)

    def _show_lines(self, rank: int, lines: Sequence[bytes]) -> None:
        for key in map(_key, lines):
            self._lines.setdefault(key, rank)
        while len(self._lines) > MOST_LINES:
            del self._lines[next(iter(self._lines))]
        if lines:
            self._show(rank, lines)

    def is_holding(self, rank: int) -> bool:
        return rank in self._held or rank in self._echoes

    def release(self, rank: int, killed: bool = False, failed: bool = False) -> None:
        """The held-back lines of this rank are complete, or there will be no more because it has failed."""
        self._release_echo(rank, failed)
        lines = self._held.pop(rank, None)
        if lines is None:
            return
        key = b"interrupted" if self.interrupted else exception_of(lines)
        if killed:
            key = next((whole for whole in self._shown if whole.startswith(key)), key)
        shown = self._shown.get(key)
        if shown is None or rank == shown.rank or rank in shown.others:  # a second one of its own is shown
            self._note(key)
            self._shown[key] = Shown(rank)
            self._show(rank, lines)
        else:
            shown.others.add(rank)
            shown.when = time.monotonic()

    def tick(self) -> None:
        """Called regularly: release what has been complete for a while."""
        now = time.monotonic()
        for rank in [rank for rank in {*self._held, *self._echoes} if now - self._last[rank] > QUIET_SECONDS]:
            self.release(rank)
        for key in [key for key, shown in self._shown.items() if now - shown.when > NOTE_SECONDS]:
            self._note(key)

    def close(self) -> None:
        for rank in [*self._held, *self._echoes]:
            self.release(rank)
        for key in list(self._shown):
            self._note(key)

    def _note(self, key: bytes) -> None:
        shown = self._shown.get(key)
        if shown is not None and shown.others:
            how = "interrupted as well" if self.interrupted else "the same"
            self._say(f"{ranks_in_words(shown.others)}: {how}")
            shown.others = set()


def _key(line: bytes) -> bytes:
    """A line without what differs from rank to rank."""
    return _DIFFERS.sub(b"#", _OWN_PREFIX.sub(b"", line)).strip()


def exception_of(lines: Sequence[bytes]) -> bytes:
    """The type and text of the last exception of a traceback, without what differs from rank to rank."""
    last = max(index for index, line in enumerate(lines) if _BEGIN.match(line))
    frames = last + 1
    bare = [_OWN_PREFIX.sub(b"", line) for line in lines]
    while frames < len(lines) and _FRAME.match(bare[frames]):
        frames += 1
    text = b"".join(bare[frames:])
    return _DIFFERS.sub(b"#", text).strip()
