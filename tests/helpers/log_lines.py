"""What sherd logs, as a list of lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def log_lines() -> Iterator[list[str]]:
    handler = _Lines()
    logging.getLogger("sherd").addHandler(handler)
    try:
        yield handler.lines
    finally:
        logging.getLogger("sherd").removeHandler(handler)
