"""What stands in the place of the parts of a communicator that was closed, and holds nothing."""

from __future__ import annotations

from typing import Any

from sherd.errors import CommClosed

WORDS = "this communicator cannot be used any more: it was closed"
MEANWHILE = (
    "this communicator was closed during this call, by another thread or because nobody held it any more; keep it in a "
    "variable until its calls are complete"
)


class Closed:
    """Whoever asks it for anything hears that."""

    def __getattr__(self, name: str) -> Any:
        raise CommClosed(WORDS)


CLOSED: Any = Closed()
