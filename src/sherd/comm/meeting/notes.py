"""Notes: what ranks leave for each other in a store, under a seal.

Anyone who reaches the store can write to it, so a note is JSON with an HMAC by a key of the job (see `seal`), which
covers its key in the store too. A note without one is ignored. And the store may be on a host that can no longer be
reached, so nothing waits long for an answer (see `Inquiry`).

One of them is a *report*: why a rank gave up. Without a token anyone may have left one, so nothing is assumed about its
form.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.distributed import DistError, DistNetworkError, Store

from sherd.comm.trust.seal import Seal
from sherd.errors import CommError, Diverged, PeerLost, TimedOut

LAUNCHERS = "sherd/launch/fault"
"""Where `sherd run` says which of its ranks failed, for ranks and launchers on other hosts that wait for it."""
FORGED = object()
"""Stands for a note that is not sealed with this key."""
LIMIT = 0.5  # seconds; an answer takes less than a millisecond
_KINDS: dict[type[CommError], str] = {Diverged: "diverged", PeerLost: "lost", TimedOut: "late"}
_ERRORS = {kind: error for error, kind in _KINDS.items()}


class Inquiry:
    """Questions to a store that may be on a host that can no longer be reached, answered one after another.

    Over a cut network, the kernel gives up on a question after a quarter of an hour. So questions are asked on a thread
    of their own, and the caller waits for a bounded time. The store is dropped with this object, or when it is closed.
    """

    def __init__(self, store: Store, limit: float = LIMIT) -> None:
        self._limit = limit
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._open: _Question | None = None  # the last one that was not answered in time
        self.gone = False
        """Whether the store has ended, which is final."""
        self._end = weakref.finalize(self, self._questions.put, None)
        # A daemon: an answer that never arrives must not keep a process from ending.
        threading.Thread(target=_answer_all, args=(store, self._questions), name="sherd-store", daemon=True).start()

    def ask(self, question: Callable[[Any], Any]) -> Any:
        """The answer, or None when the store is gone or silent."""
        return None if self.silent_for() else self._put(question)

    def tell(self, question: Callable[[Any], Any]) -> None:
        """The same for what must not be lost: a store that is silent gets it once it answers again."""
        self._put(question, wait=not self.silent_for())

    def _put(self, question: Callable[[Any], Any], wait: bool = True) -> Any:
        if self.gone:
            return None
        asked = _Question(question)
        self._questions.put(asked)
        if not wait:
            return None
        # In two halves: for a job that was suspended meanwhile, the first is over at once, and the second remains.
        if not asked.answered.wait(self._limit / 2) and not asked.answered.wait(self._limit / 2):
            self._open = asked
            return None
        self.gone = self.gone or asked.gone
        return asked.answer

    def close(self) -> None:
        """Close, once the questions asked so far are answered."""
        self.gone = True
        self._end()

    def silent_for(self) -> float:
        """Seconds since the store stopped answering, 0 while it does."""
        if self._open is None or self._open.answered.is_set():
            return 0.0
        return time.monotonic() - self._open.since


class Notes(Inquiry):
    """The notes of some ranks in their store. `seal` may be replaced by another; without one, notes are plain JSON."""

    def __init__(self, store: Store, seal: Seal | None) -> None:
        self.seal = seal
        # A connection of its own: it must not wait behind others that use the store for long.
        try:
            own: Any = store.clone() if hasattr(store, "clone") else store
        except DistError as error:
            raise CommError(f"the connection to the store of this job is lost: {error}") from error
        self._lists = own.has_extended_api()
        super().__init__(own)

    def leave(self, key: str, value: Any) -> None:
        """Leave a note, which replaces an earlier one."""
        data = self._sealed(key, value)
        self.tell(lambda store: store.set(key, data))

    def leave_newest(self, key: str, make: Callable[[], Any]) -> None:
        """Leave what `make` returns at the time of writing, so that a newer note is never replaced by an older one."""
        self.tell(lambda store: store.set(key, self._sealed(key, make())))

    def leave_first(self, key: str, value: Any) -> None:
        """Leave a note unless there is one already."""
        data = self._sealed(key, value)

        def write(store: Any) -> None:
            there = store.compare_set(key, b"", data)
            if there != data and self._opened(key, there) is FORGED:
                store.set(key, data)

        self.tell(write)

    def sign(self, key: str, number: int) -> None:
        """Add a number to a list that all ranks add to. It is a hint where to look, and has no seal."""
        if self._lists:
            self.tell(lambda store: store.append(key, f"{number} "))

    def signed(self, key: str, most: int) -> set[int]:
        """The numbers below `most` in such a list; all of them where a store has no lists."""
        if not self._lists:
            return set(range(most))
        listed: bytes = self.ask(lambda store: store.check([key]) and store.get(key)) or b""
        return {int(word) for word in listed.split() if word.isdigit() and len(word) < 10 and int(word) < most}

    def find(self, key: str) -> Any:
        """What a note says, or None if there is none."""
        return self.ask(lambda store: self._read(store, key))

    def find_some(self, keys: Iterable[str]) -> dict[str, Any]:
        """Those of these notes that are there."""
        wanted = list(keys)
        whole = self.find_all(wanted)  # two questions are enough if all of them are there
        found = zip(wanted, whole, strict=True) if whole else ((key, self.find(key)) for key in wanted)
        return {key: value for key, value in found if value is not None and value is not FORGED}

    def find_all(self, keys: list[str]) -> list[Any] | None:
        """What these notes say, `FORGED` for one that is not sealed with this key; None until all are there."""
        found: list[bytes] = self.ask(lambda store: store.check(keys) and store.multi_get(keys))
        return [self._opened(key, data) for key, data in zip(keys, found, strict=True)] if found else None

    def missing(self, keys: Sequence[str]) -> list[str]:
        """The keys without a note."""
        absent: list[str] = self.ask(lambda store: [key for key in keys if not store.check([key])])
        return absent or []

    def mark(self, key: str) -> None:
        """Leave a mark without text or seal: it only tells when to look for notes."""
        self.tell(lambda store: store.set(key, b"1"))

    def marked(self, key: str) -> bool:
        """Whether someone left this mark."""
        return bool(self.ask(lambda store: store.check([key])))

    def report(self, error: CommError, rank: int) -> None:
        """Tell the others why this rank gives up. The first report stands."""
        kind = _KINDS.get(type(error), "failed")
        self.leave_first("fault", {"kind": kind, "rank": rank, "ranks": error.ranks, "text": str(error)})

    def reported(self, names: Sequence[str], rank: int) -> CommError | None:
        """What another of the ranks with these names has reported, as an error of `rank`; None if it cannot be read."""
        note = self.find("fault")
        try:
            kind, sender, ranks = str(note["kind"]), int(note["rank"]), [int(r) for r in note["ranks"]]
            text = printable(note["text"])
        except (LookupError, TypeError, ValueError):
            return None
        if sender == rank or not 0 <= sender < len(names):
            return None
        if kind not in _ERRORS:
            return PeerLost(f"{names[sender]} failed with {text}", (sender,))
        return _ERRORS[kind](text if kind == "diverged" else f"{names[sender]} reports: {text}", tuple(ranks))

    def answers(self) -> bool:
        """Whether the store answers."""
        return self.ask(lambda _: True) is True

    def _read(self, store: Any, key: str) -> Any:
        if not store.check([key]):
            return None
        value = self._opened(key, store.get(key))
        return None if value is FORGED else value

    def _sealed(self, key: str, value: Any) -> bytes:
        data = json.dumps(value).encode()
        return data if self.seal is None else self.seal.sealed(key, data)

    def _opened(self, key: str, data: bytes) -> Any:
        opened = data if self.seal is None else self.seal.opened(key, data)
        try:
            return FORGED if opened is None else json.loads(opened)
        except (ValueError, RecursionError):  # anyone could write it
            return FORGED


def printable(words: object) -> str:
    """What others wrote, made safe for a terminal."""
    return "".join(letter for letter in str(words) if letter.isprintable() or letter == "\n")[:4000]


class _Question:
    def __init__(self, question: Callable[[Any], Any]) -> None:
        self.question = question
        self.since = time.monotonic()
        self.answered = threading.Event()
        self.answer: Any = None
        self.gone = False  # the connection is lost for good


def _answer_all(store: Store, questions: queue.SimpleQueue[_Question | None]) -> None:
    while (asked := questions.get()) is not None:
        try:
            asked.answer = asked.question(store)
        except Exception as error:  # strangers may have left anything there, and other questions must go on
            asked.gone = isinstance(error, DistNetworkError)
        asked.answered.set()
        del asked
