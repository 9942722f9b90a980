"""Reports: why a rank gave up, in a note that all others find.

Without a token anyone may have left one, so nothing is assumed about its form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sherd.errors import CommError, Diverged, PeerLost, TimedOut

_KINDS: dict[type[CommError], str] = {Diverged: "diverged", PeerLost: "lost", TimedOut: "late"}
_ERRORS = {kind: error for error, kind in _KINDS.items()}


@dataclass(frozen=True)
class Report:
    """By `rank`, about `ranks`."""

    kind: str
    rank: int
    ranks: Sequence[int]
    text: str

    @classmethod
    def of(cls, error: CommError, rank: int) -> Report:
        return cls(_KINDS.get(type(error), "failed"), rank, error.ranks, str(error))

    @classmethod
    def read(cls, note: Any, names: Sequence[str]) -> Report | None:
        """From a note of one of the ranks with these names; None if there is none, or it cannot be read."""
        try:
            kind, rank, ranks = str(note["kind"]), int(note["rank"]), [int(r) for r in note["ranks"]]
            text = printable(note["text"])
        except (LookupError, TypeError, ValueError):
            return None
        return cls(kind, rank, ranks, text) if 0 <= rank < len(names) else None

    def note(self) -> dict[str, Any]:
        return asdict(self)

    def error(self, names: Sequence[str]) -> CommError:
        """As the error of a rank that learns of it."""
        who = names[self.rank]
        if self.kind not in _ERRORS:
            return PeerLost(f"{who} failed with {self.text}", (self.rank,))
        text = self.text if self.kind == "diverged" else f"{who} reports: {self.text}"
        return _ERRORS[self.kind](text, tuple(self.ranks))


def printable(words: object) -> str:
    """What others wrote, made safe for a terminal."""
    return "".join(letter for letter in str(words) if letter.isprintable() or letter == "\n")[:4000]
