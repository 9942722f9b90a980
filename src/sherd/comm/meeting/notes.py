"""Notes: what ranks leave for each other in a store, under a seal.

Anyone who reaches the store can write to it, so a note is JSON with an HMAC by a key of the job (see `seal`), over its
place too. What has none is as if it were not there. And the store may be on a host that cannot be reached any more, so
nobody waits long for an answer (see `Inquiry`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.distributed import DistError, Store

from sherd.comm.meeting.inquiry import Inquiry
from sherd.comm.trust.seal import Seal
from sherd.errors import CommError

LAUNCHERS = "sherd/launch/fault"
"""Where `sherd run` says which of its ranks has failed, for ranks and launchers that wait for it on other hosts."""
FORGED = object()
"""In the place of a note that was not sealed with this key."""


class Notes:
    """The notes of some ranks in a store of theirs. `seal` may be exchanged for another one; without one they are plain
    JSON."""

    def __init__(self, store: Store, seal: Seal | None) -> None:
        self.seal = seal
        # A connection of its own: it must not wait behind those who use the store at length.
        try:
            own: Any = store.clone() if hasattr(store, "clone") else store
        except DistError as error:
            raise CommError(f"there is no connection to the store of this job any more: {error}") from error
        self._lists = own.has_extended_api()
        self._inquiry = Inquiry(own)
        self._ask, self._tell = self._inquiry.ask, self._inquiry.tell

    def leave(self, key: str, value: Any) -> None:
        """Leave a note, in the place of an earlier one."""
        data = self._sealed(key, value)
        self._tell(lambda store: store.set(key, data))

    def leave_newest(self, key: str, make: Callable[[], Any]) -> None:
        """Leave what `make` gives when it is written, so that the last word is not overwritten by an older one."""
        self._tell(lambda store: store.set(key, self._sealed(key, make())))

    def leave_first(self, key: str, value: Any) -> None:
        """Leave a note unless there is one."""
        data = self._sealed(key, value)

        def write(store: Any) -> None:
            there = store.compare_set(key, b"", data)
            if there != data and self._opened(key, there) is FORGED:
                store.set(key, data)

        self._tell(write)

    def sign(self, key: str, number: int) -> None:
        """Add a number to a list that everybody adds to. It is a hint where to look, and has no seal."""
        if self._lists:
            self._tell(lambda store: store.append(key, f"{number} "))

    def signed(self, key: str, most: int) -> set[int]:
        """The numbers below `most` in such a list; all of them where a store has no lists."""
        if not self._lists:
            return set(range(most))
        listed: bytes = self._ask(lambda store: store.check([key]) and store.get(key)) or b""
        return {int(word) for word in listed.split() if word.isdigit() and len(word) < 10 and int(word) < most}

    def find(self, key: str) -> Any:
        """What a note says, or None if there is none."""
        return self._ask(lambda store: self._read(store, key))

    def find_some(self, keys: Iterable[str]) -> dict[str, Any]:
        """Those of these notes that are there."""
        wanted = list(keys)
        whole = self.find_all(wanted)  # in two questions, where all are there
        found = zip(wanted, whole, strict=True) if whole else ((key, self.find(key)) for key in wanted)
        return {key: value for key, value in found if value is not None and value is not FORGED}

    def find_all(self, keys: list[str]) -> list[Any] | None:
        """What these notes say, `FORGED` for one that others have left in its place; None until all are there."""
        found: list[bytes] = self._ask(lambda store: store.check(keys) and store.multi_get(keys))
        return [self._opened(key, data) for key, data in zip(keys, found, strict=True)] if found else None

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those that are not there."""
        absent: list[str] = self._ask(lambda store: [key for key in keys if not store.check([key])])
        return absent or []

    def mark(self, key: str) -> None:
        """Leave a mark without words or a seal: it tells when to look for notes, and nothing else."""
        self._tell(lambda store: store.set(key, b"1"))

    def marked(self, key: str) -> bool:
        """Whether somebody has."""
        return bool(self._ask(lambda store: store.check([key])))

    def answers(self) -> bool:
        """Whether the store does."""
        return self._ask(lambda _: True) is True

    def silent_for(self) -> float:
        """Seconds since it has stopped to."""
        return self._inquiry.silent_for()

    @property
    def gone(self) -> bool:
        """Whether the store has ended."""
        return self._inquiry.gone

    def close(self) -> None:
        self._inquiry.close()

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
        except (ValueError, RecursionError):  # what anyone could write
            return FORGED
