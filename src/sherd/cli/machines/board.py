"""What launchers tell each other: plain JSON in the store of machine 0, sealed if there is a token.

Whoever reaches the port of a store can write to it. Nothing that is read from it is therefore more than data, and with
a token nothing is believed that does not carry its seal, under the key at which it was found, for this very run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Store, TCPStore

from sherd.cli.machines.aside import aside
from sherd.comm.meeting.notes import LAUNCHERS
from sherd.comm.trust.seal import Seal

HELLO = "sherd/launch/hello"  # by machine 0: which run this is, and how many machines it waits for
PLAN = "sherd/launch/plan"  # by machine 0: all machines, once they are there
OFF = "sherd/launch/off"  # by any machine: why there will be no run
FAULT = LAUNCHERS  # by the first machine on which a rank failed
ANSWER = timedelta(seconds=30)  # for the store to answer
BRIEF_SECONDS = 1.0  # for the store to take the words of one who has to go on, or is about to leave
CONNECT = 5.0  # seconds for a store that listens to take a connection

News = dict[str, Any]
T = TypeVar("T")


class Board:
    """The store, in words. Errors of the store are `torch.distributed.DistError`s: machine 0 is gone.

    A word that is not answered within `patience` is such an error too. Without that limit, a call waits for as long as
    machine 0 is silent, and signals wait with it: for threads that nobody waits for.
    """

    def __init__(
        self,
        store: TCPStore,
        seal: Seal | None,
        run: str | None = None,
        patience: float | None = ANSWER.total_seconds(),
    ) -> None:
        self.store = store
        self.seal = seal
        self.run = run  # its number; None until machine 0 has told it
        self.patience = patience
        self.strange: set[str] = set()  # keys at which something was found that was not believed
        store.set_timeout(ANSWER)

    def again(self) -> Board:
        """The same over another connection, for another thread: one that waits does not hold up the others."""
        return Board(connected(self.store.host, self.store.port), self.seal, self.run, patience=None)

    def brief(self) -> Board:
        """The same for words that must not take long: a cut cable lets nobody know that it is cut."""
        return Board(self.store, self.seal, self.run, BRIEF_SECONDS)

    def write(self, key: str, news: News) -> None:
        packed = self._packed(key, news)
        self._ask(lambda: _set(self.store, key, packed))

    def claim(self, key: str, before: bytes, news: News) -> bytes | None:
        """Write if `before` is what is there (b"": nothing); what was written, or None if another came first."""
        packed = self._packed(key, news)
        return packed if self._ask(lambda: _compare_set(self.store, key, before, packed)) == packed else None

    def write_first(self, key: str, news: News) -> News:
        """Write unless there is something to believe already; what is there afterwards."""
        if self.claim(key, b"", news) is None:
            if found := self.read(key):
                return found
            self.write(key, news)  # over what a stranger left
        return news

    def read(self, key: str) -> News | None:
        """What was written; None while there is nothing that can be believed."""
        raw = self.raw(key)
        news = self._unpacked(key, raw) if raw else None
        if raw and news is None:
            self.strange.add(key)
        return news

    def raw(self, key: str) -> bytes:
        return self._ask(lambda: self.store.get(key) if self.store.check([key]) else b"")

    def _ask(self, job: Callable[[], T]) -> T:
        return job() if self.patience is None else aside(job, self.patience)

    def _packed(self, key: str, news: News) -> bytes:
        data = json.dumps({**news, "run": self.run}).encode()
        return data if self.seal is None else self.seal.sealed(key, data)

    def _unpacked(self, key: str, raw: bytes) -> News | None:
        data = raw if self.seal is None else self.seal.opened(key, raw)
        try:
            news = json.loads(data) if data is not None else None
        except (ValueError, RecursionError):
            return None
        if not isinstance(news, dict) or (self.run is not None and news.get("run") != self.run):
            return None
        return news


def connected(host: str, port: int) -> TCPStore:
    """A connection to a store. Raises `DistError` after CONNECT seconds without an answer."""
    timeout = timedelta(seconds=CONNECT)
    # With one who takes connections and says nothing, torch waits for ever, whatever its timeout.
    return aside(lambda: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout), 2 * CONNECT)


# torch declares values to be strings, and takes bytes as well; a seal is no text.
def _set(store: Store, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]


def _compare_set(store: Store, key: str, before: bytes, value: bytes) -> bytes:
    return store.compare_set(key, before, value)  # type: ignore[arg-type]
