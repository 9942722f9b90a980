"""One stream of a rank."""

from __future__ import annotations

import os
import time

from sherd.cli import messages
from sherd.cli.output.console import Writer
from sherd.cli.output.pieces import Pieces

READ_BYTES = 1 << 16


class Source:
    """A pipe, and the log file that its data also goes to."""

    def __init__(self, rank: int, writer: Writer, pipe: int, log: int | None) -> None:
        self.rank = rank
        self.writer = writer
        self.pipe = pipe
        self.ended = False
        self.pieces = Pieces()
        self.last = 0.0  # when data last came
        self.wrote = False
        self._log = log
        os.set_blocking(pipe, False)

    def read(self) -> bytes | None:
        """None if there is nothing yet, b"" at the end."""
        if self.ended:
            return b""
        try:
            data = os.read(self.pipe, READ_BYTES)
        except BlockingIOError:
            return None
        self.ended = not data
        self.wrote = self.wrote or bool(data)
        self.last = time.monotonic()
        if self._log is not None and data:
            self._keep(data)
        return data

    def _keep(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and self._log is not None:
                view = view[os.write(self._log, view) :]
        except OSError as error:  # a full disk must not end a training run, but must be reported
            messages.say(f"warning: the log of rank {self.rank} ends here: {error.strerror}")
            self._log = None
