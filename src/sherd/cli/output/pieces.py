"""The bytes of one stream of a rank, cut into pieces (see `console`)."""

from __future__ import annotations

import re

MOST_BYTES = 1 << 16  # of a line that does not end

# A carriage return at the very end may be half of "\r\n".
_PIECE = re.compile(rb"[^\r\n]*(?:\r?\n|\r(?=[^\n]))")


class Pieces:
    """Takes bytes as they come, gives pieces; keeps what has begun."""

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
        """What has begun, now: no more is to be waited for."""
        rest, self.rest = self.rest, b""
        return rest
