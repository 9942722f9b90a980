"""Numbers that ranks draw from the job's store, each number once: who is done first draws next.

Whoever reaches the store can change what it counts, and an answer may be lost. So a ticket is a hint, and nothing may
depend on it: those who draw tickets tell each other afterwards what they did.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch.distributed import DistError, Store

from sherd.comm.meeting.notes import Inquiry

LARGEST = 1 << 62  # a number that anyone else wrote may be any
PATIENCE = 10.0  # seconds: a number whose answer is not waited for is lost, and its work waits until the end
ENDED = 1 << 40  # added to end the drawing; more tickets than that are never drawn


class Tickets:
    """The numbers 0, 1, 2, ... under a name that no one else uses in this store."""

    def __init__(self, store: Store, name: str) -> None:
        self._name = f"sherd/tickets/{name}"
        # A connection of its own: it must not wait behind others that use the store for long.
        own: Any = store
        with contextlib.suppress(DistError):  # it is lost: then there are no tickets
            own = store.clone() if hasattr(store, "clone") else store
        self._inquiry = Inquiry(own, PATIENCE)

    def draw(self) -> int | None:
        """The next number; None if there are no more, or the store does not answer."""
        drawn = self._inquiry.ask(lambda store: store.add(self._name, 1))
        number = drawn - 1 if isinstance(drawn, int) and 0 < drawn < LARGEST else ENDED
        return number if number < ENDED else None

    def end(self) -> None:
        """No rank draws another one."""
        self._inquiry.ask(lambda store: store.add(self._name, ENDED))

    def close(self, forget: bool) -> None:
        """Leave. With `forget`, on one rank when all are done, the store forgets the count."""
        if forget:
            self._inquiry.tell(lambda store: store.delete_key(self._name))
        self._inquiry.close()
