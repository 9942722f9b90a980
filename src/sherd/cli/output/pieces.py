"""The bytes of one stream of a rank, cut into pieces (see `console`)."""

from __future__ import annotations

import re

MOST_BYTES = 1 << 16  # of an unfinished line

# A carriage return at the very end may be half of "\r\n".
_PIECE = re.compile(rb"[^\r\n]*(?:\r?\n|\r(?=[^\n]))")


class Pieces:
    """Takes bytes as they arrive and gives whole pieces; keeps the unfinished one."""

    def __init__(self) -> None:
        self.rest = b""

    def cut(self, data: bytes) -> list[bytes]:
        data = self.rest + data
        found = _PIECE.findall(data)
        self.rest = data[sum(map(len, found)) :]
        if len(self.rest) >= MOST_BYTES:
            found.append(self.take())
        return found

    def take(self) -> bytes:
        """The unfinished piece, without waiting for the rest."""
        rest, self.rest = self.rest, b""
        return rest
