"""What a rank prints, forwarded to the caller's own stdout or stderr: a notebook shows nothing else."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import sys
from typing import IO, Literal

READ_BYTES = 1 << 16

# The carriage return of a progress bar ends a line too, but one at the very end may be half of "\r\n".
_LINE = re.compile(r"[^\r\n]*(?:\r?\n|\r(?=[^\n]))")


class Output:
    """One stream of a rank, forwarded in whole lines: partial lines of several ranks would mix."""

    def __init__(self, pipe: IO[bytes], name: Literal["stdout", "stderr"], prefix: str) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.open = True
        self._pipe = pipe
        self._name = name
        self._prefix = prefix
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""  # an incomplete line

    def fileno(self) -> int:
        return self._pipe.fileno()

    def forward(self) -> None:
        """Write what has arrived since the last time, without waiting for more."""
        if (data := self._read()) is not None:
            self._write(self._decoder.decode(data))

    def close(self) -> None:
        """Write what is left and close the pipe, without waiting for processes that still hold its other end."""
        with contextlib.suppress(OSError, ValueError):  # the caller's stream is closed: nobody reads it
            while data := self._read():
                self._write(self._decoder.decode(data))
            self._write(self._decoder.decode(b"", final=True))
            if self._rest:
                self._write("\n")
        self._pipe.close()

    def _read(self) -> bytes | None:
        """None if there is nothing yet, b"" at the end."""
        if not self.open:
            return None
        try:
            data = os.read(self.fileno(), READ_BYTES)
        except BlockingIOError:
            return None
        self.open = data != b""
        return data

    def _write(self, text: str) -> None:
        text = self._rest + text
        lines = _LINE.findall(text)
        self._rest = text[sum(map(len, lines)) :]
        stream = getattr(sys, self._name)  # looked up now: a notebook or a test may have replaced it
        if lines and stream is not None:
            stream.write("".join(f"{self._prefix}{line}" for line in lines))
            stream.flush()
