"""Waiting over torch.distributed without hanging and without silence.

The backend's own waits end in an error that names nobody, or not at all. Here every rank says in the store what it last
did (a thread publishes it once a second, so a rank that is busy elsewhere has still said it, and one that is stopped or
cut off is silent); who waits looks every tenth of a second whether a peer has died, left or failed, and knows whom to
name when it gives up. A rank that was busy meanwhile hears of it in its next call, even if what others sent before they
gave up would do to complete it.
"""

from __future__ import annotations

import contextlib
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
from sherd.comm.c10d.guard import Guard
from sherd.comm.c10d.inquiry import Inquiry
from sherd.comm.host.peers import Peers
from sherd.comm.progress import move_everything
from sherd.config import CommOptions
from sherd.errors import CommError, ConfigError, Diverged, PeerLost, TimedOut

LOOK_EVERY = 0.1
MOVE_EVERY = 0.005  # while something else is under way
PUBLISH_EVERY = 1.0
PATIENCE = 0.2
EXPLAIN_WITHIN = 1.0
SEEK_EVERY, SEEK = 0.005, 40
_FAULTS: dict[str, type[CommError]] = {"diverged": Diverged, "lost": PeerLost, "late": TimedOut}


class Watchdog:
    """Watches the peers of one rank. `peers` are the processes it can see itself, those of its own host. Collective."""

    def __init__(
        self, store: Store, rank: int, names: Sequence[str], peers: Peers | None, options: CommOptions
    ) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # a connection of its own: the thread must not wait behind the user's calls
        self._pid = os.getpid()
        self._rank = rank
        self._names = names
        self._peers = peers or Peers({}, {})
        before, after = (rank - 1) % len(names), (rank + 1) % len(names)
        self._guard = Guard(store, None if before in self._peers else before, after not in self._peers)
        self._store.set(f"door/{rank}", json.dumps(self._guard.door))
        # A thread beats while another waits; either may be interrupted by what closes this.
        self._looking = threading.RLock()
        self._options = options
        self._deed: dict[str, Any] = {"number": 0, "text": "", "since": time.time(), "inside": False, "left": False}
        self._published: dict[str, Any] = {}
        self._beat = 0  # counts what was published
        self._news: CommError | None = None  # what another rank has reported while this one was busy
        self._beat_every = min(PUBLISH_EVERY, options.warn_seconds / 3)
        self._heard: dict[int, tuple[int, float]] = {}  # the last beat of every rank, and when it was new here
        self._known: dict[int, dict[str, Any]] = {}
        self._inquiry = Inquiry()
        self._ask = self._inquiry.ask
        self._stop = threading.Event()
        # By a weak reference: the thread must not keep alive what nobody else holds.
        arguments = (weakref.ref(self), self._stop, self._beat_every)
        threading.Thread(target=_beat_forever, args=arguments, name="sherd-watchdog", daemon=True).start()

    # ---------------------------------------------------------------- what this rank does

    def enter(self, number: int, text: str) -> dict[str, Any]:
        """Note a call. `number` counts the collectives: by it ranks see who is behind."""
        if self._news is not None:
            raise self._news
        self._deed = {"number": number, "text": text, "since": time.time(), "inside": True, "left": False}
        return self._deed

    def finish(self, deed: dict[str, Any]) -> None:
        if self._deed is deed:
            self._deed = {**deed, "inside": False}

    def report(self, kind: str, error: CommError) -> CommError:
        """Tell the others why this rank gives up. The first report stands."""
        text = json.dumps({"kind": kind, "rank": self._rank, "ranks": error.ranks, "text": str(error)})
        self._ask(lambda: self._store.compare_set("fault", "", text))
        with contextlib.suppress(ConfigError):  # the events' stream may be closed, and what went wrong matters more
            faults.emit_fault(error)
        return error

    def close(self) -> None:
        """Say that this rank has left. A forked child says nothing: the rank itself is still there."""
        if not self._stop.is_set() and os.getpid() == self._pid:
            self._stop.set()
            self._deed = {**self._deed, "inside": False, "left": True}
            self.publish()
            self._ask(lambda: self._store.add("left", 1))
            with self._looking:
                self._peers.close()
                self._guard.close()

    # ---------------------------------------------------------------- waiting

    def wait(self, work: dist.Work) -> None:
        """Complete a collective."""

        def attempt(seconds: float) -> bool:
            if seconds > MOVE_EVERY and not work.is_completed() and move_everything():
                seconds = MOVE_EVERY
            try:
                work.wait(timedelta(seconds=seconds))
            except RuntimeError:
                if not work.is_completed():
                    return False
                work.wait()  # it may have ended, well or not, just after the time was up
            return True

        self.watch(attempt, range(len(self._names)))

    def watch(
        self, attempt: Callable[[float], bool], needed: Sequence[int], slow: Callable[[], Sequence[int]] = tuple
    ) -> None:
        """Repeat `attempt(seconds)` until it is True, for as long as the `needed` ranks may still do their part.

        `slow` knows whose data is on its way when everybody has come.
        """
        start = time.monotonic()
        listened = False
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
            if not listened:
                listened = bool(self._deeds())  # from now on it shows who is silent
            waited = time.monotonic() - start
            if waited > self._options.timeout:
                raise self._timed_out(waited, self._missing(needed) or slow())
            if time.monotonic() > warn_at:
                self._warn(waited, self._missing(needed) or slow())
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
        with self._looking:
            dead = [*self._peers.dead(), *self._guard.dead()]
        if not dead and (not needed or not self._ask(lambda: self._store.add("left", 0))):
            return []
        left = [r for r, deed in self._deeds().items() if deed["left"]]
        return [r for r in range(len(self._names)) if (r in left and r in needed) or (r in dead and r not in left)]

    def explain(self, error: RuntimeError, needed: Sequence[int]) -> CommError:
        """The backend has lost a connection: find out to whom. Its error comes before the process is gone."""
        peers = [error.peer] if isinstance(error, faults.LinkBroken) else []
        deadline = time.monotonic() + (EXPLAIN_WITHIN if peers else EXPLAIN_WITHIN + 3 * self._beat_every)
        while time.monotonic() < deadline:
            gone = self._gone(needed)
            if gone:
                return self._lost(gone)
            reported = self._reported()
            if reported is not None:
                return reported
            self._deeds()
            time.sleep(0.05)
        peers = peers or self._silent(needed) or self._missing(needed)
        who = ", ".join(self._names[r] for r in peers) or "a peer"
        end = f"the connection to {who} was lost: {str(error).splitlines()[0]}"
        return self.report("lost", faults.lost([end], "; ".join(self._everyone()), peers))

    def _lost(self, ranks: Sequence[int]) -> CommError:
        deeds = self._deeds()
        ends = []
        for r in ranks:
            left = deeds.get(r, {}).get("left")
            with self._looking:
                end = "left" if left else self._peers.how_it_ended(r) if r in self._peers else "ended"
            ends.append(f"{self._names[r]} {end}; it {self._deed_of(r)}")
        return self.report("lost", faults.lost(ends, f"{self._names[self._rank]} {_words(self._deed)}", ranks))

    def _missing(self, needed: Sequence[int]) -> list[int]:
        """Who is waited for: the peer of a message, or the ranks that have not come to this collective."""
        if len(needed) == 1:
            return list(needed)
        deeds = self._deeds()
        if self._inquiry.silent_for():
            return [r for r in needed if r != self._rank]  # nobody can be heard of from here
        number = self._deed["number"]
        behind = [
            r for r in range(len(self._names)) if r != self._rank and deeds.get(r, {"number": 0})["number"] < number
        ]
        return behind or self._silent(needed)

    def _silent(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that were in a call and whose beats have stopped: they are stopped, or cut off."""
        now = time.monotonic()
        silence = {r: now - when for r, (_, when) in list(self._heard.items()) if self._known[r]["inside"]}
        return [r for r in ranks if r != self._rank and silence.get(r, 0.0) > 2 * self._beat_every]

    def _timed_out(self, seconds: float, missing: Sequence[int]) -> CommError:
        late = [self._names[r] for r in missing]
        return self.report("late", faults.timed_out(late, seconds, self._everyone(), missing))

    def _warn(self, seconds: float, missing: Sequence[int]) -> None:
        late = {r: f"{self._names[r]}; it {self._deed_of(r)}" for r in missing}
        faults.warn_late(self._names[self._rank], late, seconds, self._deed["text"], self._options.timeout)

    def _everyone(self) -> list[str]:
        self._deeds()
        everyone = [f"{name} {self._deed_of(r)}" for r, name in enumerate(self._names)]
        if silence := self._inquiry.silent_for():
            everyone.insert(0, f"{self._names[self._rank]} has had no word from the store for {silence:.1f} s")
        return everyone

    def _deed_of(self, rank: int) -> str:
        words = _words(self._deed if rank == self._rank else self._known.get(rank))
        if self._silent([rank]):
            words += f", and was last heard of {time.monotonic() - self._heard[rank][1]:.1f} s ago"
        return words

    # ---------------------------------------------------------------- the store

    def _deeds(self) -> dict[int, dict[str, Any]]:
        def read() -> dict[int, dict[str, Any]]:
            known = [r for r in range(len(self._names)) if self._store.check([f"deed/{r}"])]
            return {r: json.loads(self._store.get(f"deed/{r}")) for r in known}

        with self._looking:
            self._known = known = self._ask(read) or self._known
            for r, deed in known.items():
                if self._heard.get(r, (-1, 0.0))[0] != deed["beat"]:
                    self._heard[r] = (deed["beat"], time.monotonic())
        return known

    def beat(self) -> None:
        """What is done now and then, whatever this rank is busy with: tell the others, and hear of them."""
        self.publish()
        self.seek()
        self._news = self._news or self._reported()
        if self._news is None and (gone := self._gone([])) and self._ask(lambda: True):  # who has left is known
            self._news = self._lost(gone)

    def seek(self) -> bool:
        """Watch the process that is this rank's to watch, if that has come; False if it has not."""
        rank = self._guard.seeks
        if rank is not None:
            door = self._ask(lambda: self._store.check([f"door/{rank}"]) and self._store.get(f"door/{rank}"))
            if not door:
                return False
            with self._looking:
                if not self._stop.is_set():
                    self._guard.watch(json.loads(door))
        return True

    def publish(self) -> None:
        """Tell the others what this rank last did if they do not know yet, and inside a call that it is still there."""
        if self._deed is not self._published or self._deed["inside"]:
            self._ask(self._set_deed)

    def _set_deed(self) -> None:
        deed = self._deed  # read now, as questions are asked in order: the last word is not overwritten by an older one
        self._beat += 1
        self._store.set(f"deed/{self._rank}", json.dumps({**deed, "beat": self._beat}))
        self._published = deed


def _beat_forever(watchdog: weakref.ref[Watchdog], stop: threading.Event, seconds: float) -> None:
    """Beat now and then; more often until the rank to be watched has come, as it is about to."""
    sought = 0
    while not stop.wait(SEEK_EVERY if sought < SEEK else seconds):
        alive = watchdog()
        if alive is None:
            return
        if sought < SEEK:
            sought = SEEK if alive.seek() else sought + 1
        else:
            alive.beat()
        del alive


def _words(deed: dict[str, Any] | None) -> str:
    if not deed or not deed["number"]:
        return "has made no call yet"
    verb = "is in" if deed["inside"] else "last finished"
    return f"{verb} {deed['text']} (call {deed['number']}, made {time.time() - deed['since']:.1f} s ago)"
