"""Waiting over torch.distributed without hanging and without silence.

The backend's own waits end in an error that names nobody, or not at all. Here every rank says in the store what it last
did (a thread publishes it once a second, so a rank that is busy elsewhere has still said it); who waits looks every
tenth of a second whether a peer has died, left or failed, and knows whom to name when it gives up.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from sherd.comm import faults
from sherd.comm.host.peers import Peers
from sherd.config import CommOptions
from sherd.errors import CommError, Diverged, PeerLost, TimedOut

LOOK_EVERY = 0.1
PUBLISH_EVERY = 1.0
PATIENCE = 0.2
_FAULTS: dict[str, type[CommError]] = {"diverged": Diverged, "lost": PeerLost, "late": TimedOut}


class Watchdog:
    """Watches the peers of one rank. `peers` are the processes it can see itself, those of its own host."""

    def __init__(
        self, store: Store, rank: int, names: Sequence[str], peers: Peers | None, options: CommOptions
    ) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # a connection of its own: the thread must not wait behind the user's calls
        self._pid = os.getpid()
        self._rank = rank
        self._names = names
        self._peers = peers
        self._options = options
        self._deed: dict[str, Any] = {"number": 0, "text": "", "since": time.time(), "inside": False, "left": False}
        self._published: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        arguments = (weakref.ref(self), self._stop)  # the thread must not keep alive what nobody else holds
        threading.Thread(target=_publish_forever, args=arguments, name="sherd-watchdog", daemon=True).start()

    # ---------------------------------------------------------------- what this rank does

    def enter(self, number: int, text: str) -> dict[str, Any]:
        """Note a call. `number` counts the collectives: by it ranks see who is behind."""
        self._deed = {"number": number, "text": text, "since": time.time(), "inside": True, "left": False}
        return self._deed

    def finish(self, deed: dict[str, Any]) -> None:
        if self._deed is deed:
            self._deed = {**deed, "inside": False}

    def report(self, kind: str, error: CommError) -> CommError:
        """Tell the others why this rank gives up. The first report stands."""
        text = json.dumps({"kind": kind, "rank": self._rank, "ranks": error.ranks, "text": str(error)})
        self._ask(lambda: self._store.compare_set("fault", "", text))
        faults.emit_fault(error)
        return error

    def close(self) -> None:
        """Say that this rank has left. A forked child says nothing: the rank itself is still there."""
        if not self._stop.is_set() and os.getpid() == self._pid:
            self._stop.set()
            self._deed = {**self._deed, "inside": False, "left": True}
            self.publish()
            self._ask(lambda: self._store.add("left", 1))
            if self._peers:
                self._peers.close()

    # ---------------------------------------------------------------- waiting

    def wait(self, work: dist.Work) -> None:
        """Complete a collective."""

        def attempt(seconds: float) -> bool:
            try:
                work.wait(timedelta(seconds=seconds))
            except RuntimeError:
                if not work.is_completed():
                    return False
                work.wait()  # it may have ended, well or not, just after the time was up
            return True

        self.watch(attempt, range(len(self._names)))

    def watch(self, attempt: Callable[[float], bool], needed: Sequence[int]) -> None:
        """Repeat `attempt(seconds)` until it is True, for as long as the `needed` ranks may still do their part."""
        start = time.monotonic()
        warn_at = start + self._options.warn_seconds
        while True:
            try:
                if attempt(LOOK_EVERY):
                    return
            except CommError:
                raise
            except RuntimeError as error:
                raise self.explain(error, needed) from error
            # A rank that has left may have done its part of this first, and the rest be on its way.
            gone = self._gone(needed)
            if (gone or self._reported()) and not attempt(PATIENCE):
                raise self._reported() or self._lost(gone)
            waited = time.monotonic() - start
            if waited > self._options.timeout:
                raise self._timed_out(waited, needed)
            if time.monotonic() > warn_at:
                self._warn(waited, needed)
                warn_at = start + 2 * waited

    # ---------------------------------------------------------------- what may have gone wrong

    def _reported(self) -> CommError | None:
        """What another rank has reported, as an error of this one."""
        reported = self._ask(lambda: self._store.check(["fault"]) and json.loads(self._store.get("fault")))
        if not reported or reported["rank"] == self._rank:
            return None
        text = reported["text"]
        who = self._names[reported["rank"]]
        if reported["kind"] == "failed":
            return PeerLost(f"{who} failed with {text}", (reported["rank"],))
        if reported["kind"] != "diverged":
            text = f"{who} reports: {text}"
        return _FAULTS[reported["kind"]](text, tuple(reported["ranks"]))

    def _gone(self, needed: Sequence[int]) -> list[int]:
        """Ranks that died, and those among `needed` that left."""
        dead = self._peers.dead() if self._peers else []
        if not dead and not self._ask(lambda: self._store.add("left", 0)):
            return []
        left = [r for r, deed in self._deeds().items() if deed["left"]]
        return [r for r in range(len(self._names)) if (r in left and r in needed) or (r in dead and r not in left)]

    def explain(self, error: RuntimeError, needed: Sequence[int]) -> CommError:
        """The backend has lost a connection: find out to whom. Its error comes before the process is gone."""
        for _ in range(20):
            gone = self._gone(needed)
            if gone:
                return self._lost(gone)
            reported = self._reported()
            if reported is not None:
                return reported
            time.sleep(0.05)
        end = f"the connection to a peer was lost: {str(error).splitlines()[0]}"
        return self.report("lost", faults.lost([end], "; ".join(self._everyone()), ()))

    def _lost(self, ranks: Sequence[int]) -> CommError:
        deeds = self._deeds()
        ends = []
        for r in ranks:
            left = deeds.get(r, {}).get("left")
            end = "left" if left or not self._peers else self._peers.how_it_ended(r)
            ends.append(f"{self._names[r]} {end}; it {_words(deeds.get(r))}")
        return self.report("lost", faults.lost(ends, f"{self._names[self._rank]} {_words(self._deed)}", ranks))

    def _missing(self, needed: Sequence[int]) -> list[int]:
        """Who is waited for: the peer of a message, or the ranks that have not come to this collective."""
        if len(needed) == 1:
            return list(needed)
        deeds = self._deeds()
        number = self._deed["number"]
        return [
            r for r in range(len(self._names)) if r != self._rank and deeds.get(r, {"number": 0})["number"] < number
        ]

    def _timed_out(self, seconds: float, needed: Sequence[int]) -> CommError:
        missing = self._missing(needed)
        late = [self._names[r] for r in missing]
        return self.report("late", faults.timed_out(late, seconds, self._everyone(), missing))

    def _warn(self, seconds: float, needed: Sequence[int]) -> None:
        deeds = self._deeds()
        late = {r: f"{self._names[r]}; it {_words(deeds.get(r))}" for r in self._missing(needed)}
        faults.warn_late(self._names[self._rank], late, seconds, self._deed["text"], self._options.timeout)

    def _everyone(self) -> list[str]:
        deeds = {**self._deeds(), self._rank: self._deed}
        return [f"{name} {_words(deeds.get(r))}" for r, name in enumerate(self._names)]

    # ---------------------------------------------------------------- the store

    def _deeds(self) -> dict[int, dict[str, Any]]:
        def read() -> dict[int, dict[str, Any]]:
            known = [r for r in range(len(self._names)) if self._store.check([f"deed/{r}"])]
            return {r: json.loads(self._store.get(f"deed/{r}")) for r in known}

        return self._ask(read) or {}

    def publish(self) -> None:
        """Tell the others what this rank last did, if they do not know yet."""
        if self._deed is not self._published:
            self._ask(self._set_deed)

    def _set_deed(self) -> None:
        deed = self._deed  # read under the lock: the last word must not be overwritten by an older one
        self._store.set(f"deed/{self._rank}", json.dumps(deed))
        self._published = deed

    def _ask(self, question: Callable[[], Any]) -> Any:
        """An answer of the store, or None when it is gone: then there is nobody left to tell."""
        with self._lock:
            try:
                return question()
            except RuntimeError:
                return None


def _publish_forever(watchdog: weakref.ref[Watchdog], stop: threading.Event) -> None:
    while not stop.wait(PUBLISH_EVERY):
        alive = watchdog()
        if alive is None:
            return
        alive.publish()
        del alive


def _words(deed: dict[str, Any] | None) -> str:
    if not deed or not deed["number"]:
        return "has made no call yet"
    verb = "is in" if deed["inside"] else "last finished"
    return f"{verb} {deed['text']} (call {deed['number']}, made {time.time() - deed['since']:.1f} s ago)"
