"""Messages between launchers: plain JSON in the store of machine 0, sealed if there is a token.

Anyone who reaches the port of a store can write to it. So whatever is read from it is treated as mere data, and with a
token nothing is accepted without its seal, which covers the key and the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Store, TCPStore

from sherd.cli.machines.aside import NoAnswer, aside
from sherd.comm.meeting.notes import LAUNCHERS
from sherd.comm.trust.seal import Seal

HELLO = "sherd/launch/hello"  # by machine 0: the id of the run, and how many machines it waits for
PLAN = "sherd/launch/plan"  # by machine 0: all machines, once they have arrived
OFF = "sherd/launch/off"  # by any machine: why the run is called off
FAULT = LAUNCHERS  # by the first machine on which a rank failed
ANSWER = timedelta(seconds=30)  # for the store to answer
BRIEF_SECONDS = 1.0  # for the store to accept a message from a machine that must go on, or is about to leave
CONNECT = 5.0  # seconds for a listening store to accept a connection

News = dict[str, Any]
T = TypeVar("T")


class Board:
    """The store as a message board. Its errors are `torch.distributed.DistError`s: machine 0 is gone.

    No answer within `patience` is such an error too, at once while an earlier call is still without one: the calls of
    a connection wait for each other. Without that limit a call blocks as long as machine 0 is silent, and so do
    signals: only for background threads.
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
        self.run = run  # its id; None until machine 0 has sent it
        self.patience = patience
        self.strange: set[str] = set()  # keys with values that were not accepted
        self._unanswered: NoAnswer | None = None
        self._brief: Board | None = None
        store.set_timeout(ANSWER)

    def again(self) -> Board:
        """The same over another connection, for another thread, so that waiting on one does not block the other."""
        return Board(connected(self.store.host, self.store.port), self.seal, self.run, patience=None)

    def brief(self) -> Board:
        """The same for messages that must not take long: nothing reports that a cable is cut. It is always the same
        one, so that a launcher that leaves waits for a silent store once, and not for each of its last messages."""
        if self._brief is None:
            self._brief = Board(self.store, self.seal, self.run, BRIEF_SECONDS)
        self._brief.run = self.run
        return self._brief

    def write(self, key: str, news: News) -> None:
        packed = self._packed(key, news)
        self._ask(lambda: _set(self.store, key, packed))

    def claim(self, key: str, before: bytes, news: News) -> bytes | None:
        """Write if the present value is `before` (b"": none); what was written, or None if another was first."""
        packed = self._packed(key, news)
        return packed if self._ask(lambda: _compare_set(self.store, key, before, packed)) == packed else None

    def write_first(self, key: str, news: News) -> News:
        """Write unless there is an acceptable value; the value that is there afterwards."""
        if self.claim(key, b"", news) is None:
            if found := self.read(key):
                return found
            self.write(key, news)  # over a value that was not accepted
        return news

    def read(self, key: str) -> News | None:
        """The value; None while there is no acceptable one."""
        raw = self.raw(key)
        news = self._unpacked(key, raw) if raw else None
        if raw and news is None:
            self.strange.add(key)
        return news

    def raw(self, key: str) -> bytes:
        return self._ask(lambda: self.store.get(key) if self.store.check([key]) else b"")

    def _ask(self, job: Callable[[], T]) -> T:
        if self.patience is None:
            return job()
        if self._unanswered and not self._unanswered.pending.done():
            raise self._unanswered
        try:
            return aside(job, self.patience)
        except NoAnswer as error:
            self._unanswered = error
            raise

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
    # If the other end accepts connections and stays silent, torch waits for ever, despite its timeout.
    return aside(lambda: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout), 2 * CONNECT)


# torch declares values as strings, but also takes bytes, and a seal is not text.
def _set(store: Store, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]


def _compare_set(store: Store, key: str, before: bytes, value: bytes) -> bytes:
    return store.compare_set(key, before, value)  # type: ignore[arg-type]
