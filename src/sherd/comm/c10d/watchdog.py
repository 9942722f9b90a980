"""Waiting over torch.distributed without hanging and without silence.

The backend's own waits end in an error that names nobody, or not at all. Here every rank says in the store what it last
did (a thread publishes it once a second, so a rank that is busy elsewhere has still said it, and one that is stopped or
cut off is silent); who waits looks every tenth of a second whether a peer has died, left or failed, and knows whom to
name when it gives up. A rank that was busy meanwhile hears of it in its next call, even if what others sent before they
gave up would do to complete it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from sherd.comm.closing import CLOSED_MEANWHILE
from sherd.comm.meeting.guard import Guard
from sherd.comm.meeting.notes import Notes
from sherd.comm.meeting.peers import Peers
from sherd.comm.meeting.reports import Report
from sherd.comm.trust.seal import Seal
from sherd.comm.waiting import deadlock, faults
from sherd.comm.waiting.deadlock import COLLECTIVE, Stance, circle
from sherd.comm.waiting.patience import Stopwatch, limit
from sherd.comm.waiting.progress import move_everything
from sherd.config import CommOptions
from sherd.errors import CommClosed, CommError, ConfigError

LOOK_EVERY = 0.1
MOVE_EVERY = 0.005  # while something else is under way
PUBLISH_EVERY = 1.0
PATIENCE = 0.2
EXPLAIN_WITHIN = 1.0
SEEK_EVERY, SEEK = 0.005, 40
DEED = {"number", "text", "since", "inside", "left", "beat"}
CIRCLE_EVERY = 0.5  # after which it is looked for, and again and again, ever more rarely


TakeStance = Callable[[], Stance | None]
"""What this rank waits for, if others could be waiting for it in a circle."""


def no_stance() -> None:
    return None


class Watchdog:
    """Watches the peers of one rank. `peers` are the processes it can see itself, those of its own host. Collective."""

    def __init__(
        self,
        store: Store,
        seal: Seal,
        rank: int,
        names: Sequence[str],
        peers: Peers | None,
        options: CommOptions,
        guard: Guard | None = None,
    ) -> None:
        """`guard` watches the rank before this one already, if that is not among the peers."""
        self._notes = Notes(store, seal)
        self._pid = os.getpid()
        self._rank = rank
        self._names = names
        self._peers = peers or Peers({}, {})
        before, after = (rank - 1) % len(names), (rank + 1) % len(names)
        if guard is None:
            guard = Guard(store, None if before in self._peers else before, after not in self._peers)
            self._notes.leave(f"door/{rank}", {"door": guard.door})
        self._guard = guard
        # A thread beats while another waits; either may be interrupted by what closes this.
        self._looking = threading.RLock()
        self._options = options
        self._deed: dict[str, Any] = {"number": 0, "text": "", "since": time.time(), "inside": False, "left": False}
        self._stance: Stance | None = None  # the last that this rank took, see `deadlock`
        self._owner: int | None = threading.get_ident()  # the thread that makes the calls; None once others do too
        self._published: dict[str, Any] = {}
        self._beat = 0  # counts what was published
        self._news: CommError | None = None  # what another rank has reported while this one was busy
        self._beat_every = min(PUBLISH_EVERY, options.warn_seconds / 3)
        self._heard: dict[int, tuple[int, float]] = {}  # the last beat of every rank, and when it was new here
        self._clock = Stopwatch(self._beat_every)  # looked at with every beat of this rank: they pause together
        self._known: dict[int, dict[str, Any]] = {}
        self._stop = threading.Event()
        # By a weak reference: the thread must not keep alive what nobody else holds.
        arguments = (weakref.ref(self), self._stop, self._beat_every)
        threading.Thread(target=_beat_forever, args=arguments, name="sherd-watchdog", daemon=True).start()

    # ---------------------------------------------------------------- what this rank does

    def enter(self, number: int, text: str, message: bool = False) -> dict[str, Any]:
        """Note a call. `number` counts the collectives: by it ranks see who is behind."""
        if self._news is not None:
            raise type(self._news)(str(self._news), self._news.ranks)  # another one: its traceback holds the caller
        if threading.get_ident() != self._owner:
            self._owner = self._stance = None  # what one thread waits for, another may do
        call = "" if message else f"call {number}, "
        self._deed = {"number": number, "text": text, "since": time.time(), "inside": True, "left": False, "call": call}
        return self._deed

    def use_here(self) -> None:
        """Another thread goes on: they take turns."""
        self._owner = threading.get_ident()

    def finish(self, deed: dict[str, Any]) -> None:
        if self._deed is deed:
            self._deed = {**deed, "inside": False}

    def report(self, error: CommError) -> CommError:
        """Tell the others why this rank gives up. The first report stands."""
        self._notes.leave_first("fault", Report.of(error, self._rank).note())
        with contextlib.suppress(ConfigError):  # the events' stream may be closed, and what went wrong matters more
            faults.emit_fault(error)
        return error

    def close(self) -> None:
        """Say that this rank has left. A forked child says nothing: the rank itself is still there."""
        if not self._stop.is_set() and os.getpid() == self._pid:
            self._stop.set()
            self._deed = {**self._deed, "inside": False, "left": True, "through": not self._deed["inside"]}
            self.publish()
            self._notes.mark("left")
            with self._looking:
                self._peers.close()
                self._guard.close()
            self._notes.close()

    # ---------------------------------------------------------------- waiting

    def wait(self, work: dist.Work, stance: TakeStance = no_stance) -> None:
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

        self.watch(attempt, range(len(self._names)), stance=stance)

    def watch(
        self,
        attempt: Callable[[float], bool],
        needed: Sequence[int],
        slow: Callable[[], Sequence[int]] = tuple,
        stance: TakeStance = no_stance,
    ) -> None:
        """Repeat `attempt(seconds)` until it is True, for as long as the `needed` ranks may still do their part.

        `slow` knows whose data is on its way when everybody has come, and `stance` what this rank waits for.
        """
        waiting = Stopwatch()
        listened = False
        warn_at, circle_at = self._options.warn_seconds, 0.0
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
            waited = waiting.seconds()
            if waited > circle_at:
                circle_at = max(waited + CIRCLE_EVERY, 1.5 * waited)
                self._look_for_a_circle(stance())
            if waited > limit(self._options.timeout):
                raise self._timed_out(waited, self._missing(needed) or slow())
            if waited > warn_at:
                self._warn(waited, self._missing(needed) or slow())
                warn_at = 2 * waited

    # ---------------------------------------------------------------- what may have gone wrong

    def _reported(self) -> CommError | None:
        """What another rank has reported, as an error of this one."""
        report = Report.read(self._notes.find("fault"), self._names)
        return None if report is None or report.rank == self._rank else report.error(self._names)

    def _gone(self, needed: Sequence[int]) -> list[int]:
        """Ranks that died, and those among `needed` that left."""
        with self._looking:
            dead = [*self._peers.dead(), *self._guard.dead()]
        if not dead and (not needed or not self._notes.marked("left")):
            return []
        left = {r: deed for r, deed in self._deeds().items() if deed["left"]}
        owing = [r for r, deed in left.items() if r in needed and self._owes(deed)]
        return [r for r in range(len(self._names)) if r in owing or (r in dead and r not in left)]

    def _owes(self, deed: dict[str, Any]) -> bool:
        """Whether a rank that has left did not do its part of the collective that this one is in. What one that did has
        sent may take long on a slow cable."""
        mine = self._deed
        return not mine.get("call") or deed["number"] < mine["number"] or not deed.get("through")

    def explain(self, error: RuntimeError, needed: Sequence[int]) -> CommError:
        """The backend has lost a connection: find out to whom. Its error comes before the process is gone."""
        if self._stop.is_set():
            return CommClosed(CLOSED_MEANWHILE)
        peers = [error.peer] if isinstance(error, faults.LinkBroken) else []
        looking, enough = Stopwatch(), EXPLAIN_WITHIN if peers else EXPLAIN_WITHIN + 3 * self._beat_every
        while looking.seconds() < enough:
            gone = self._gone(needed)
            reported = self._reported()  # after that: who leaves because of an error says so first
            if reported is not None:
                return reported
            if gone:
                return self._lost(gone)
            self._deeds()
            time.sleep(0.05)
        peers = peers or self._silent(needed) or self._missing(needed)
        who = ", ".join(self._names[r] for r in peers) or "a peer"
        end = f"the connection to {who} was lost: {str(error).splitlines()[0]}"
        return self.report(faults.lost([end], "; ".join(self._everyone()), peers))

    def _look_for_a_circle(self, mine: Stance | None) -> None:
        """And say what this rank waits for, if nobody but the thread that waits makes its calls."""
        if mine is None or self._owner != threading.get_ident():
            return
        self._stance = mine
        if mine.kind == COLLECTIVE:  # who is in one is told: a circle has a message in it
            return
        deeds = self._deeds().items()
        stances = {r: Stance.from_dict(deed["stance"]) for r, deed in deeds if deed.get("stance")}
        stances[self._rank] = mine
        if ranks := circle(self._rank, stances):
            sides = deadlock.sides(ranks, stances, self._names)
            raise self.report(faults.in_a_circle(sides, sorted(ranks)))

    def _lost(self, ranks: Sequence[int]) -> CommError:
        deeds = self._deeds()
        ends = []
        for r in ranks:
            left = deeds.get(r, {}).get("left")
            with self._looking:
                end = "left" if left else self._peers.how_it_ended(r) if r in self._peers else "ended"
            ends.append(f"{self._names[r]} {end}; it {self._deed_of(r)}")
        return self.report(faults.lost(ends, f"{self._names[self._rank]} {_words(self._deed)}", ranks))

    def _missing(self, needed: Sequence[int]) -> list[int]:
        """Who is waited for: the peer of a message, or the ranks that have not come to this collective."""
        if len(needed) == 1:
            return list(needed)
        deeds = self._deeds()
        if self._notes.silent_for():
            return [r for r in needed if r != self._rank]  # nobody can be heard of from here
        number = self._deed["number"]
        behind = [
            r for r in range(len(self._names)) if r != self._rank and deeds.get(r, {"number": 0})["number"] < number
        ]
        return behind or self._silent(needed)

    def _silent(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that were in a call and whose beats have stopped: they are stopped, or cut off."""
        silence = {r: self._silence(r) for r in list(self._heard) if self._known[r]["inside"]}
        return [r for r in ranks if r != self._rank and silence.get(r, 0.0) > 2 * self._beat_every]

    def _silence(self, rank: int) -> float:
        with self._looking:
            return self._clock.seconds() - self._heard[rank][1]

    def _timed_out(self, seconds: float, missing: Sequence[int]) -> CommError:
        late = [self._names[r] for r in missing]
        return self.report(faults.timed_out(late, seconds, self._everyone(), missing))

    def _warn(self, seconds: float, missing: Sequence[int]) -> None:
        late = {r: f"{self._names[r]}; it {self._deed_of(r)}" for r in missing}
        most = limit(self._options.timeout)
        faults.warn_late(self._names[self._rank], late, seconds, self._deed["text"], most)

    def _everyone(self) -> list[str]:
        self._deeds()
        everyone = [f"{name} {self._deed_of(r)}" for r, name in enumerate(self._names)]
        if silence := self._notes.silent_for():
            everyone.insert(0, f"{self._names[self._rank]} has had no word from the store for {silence:.1f} s")
        return everyone

    def _deed_of(self, rank: int) -> str:
        words = _words(self._deed if rank == self._rank else self._known.get(rank))
        if self._silent([rank]):
            words += f", and was last heard of {self._silence(rank):.1f} s ago"
        return words

    # ---------------------------------------------------------------- the store

    def _deeds(self) -> dict[int, dict[str, Any]]:
        keys = {f"deed/{r}": r for r in range(len(self._names))}
        with self._looking:
            found = self._notes.find_some(keys)
            # Without a token anyone may have left one, of any form.
            whole = {keys[key]: deed for key, deed in found.items() if isinstance(deed, dict) and deed.keys() >= DEED}
            self._known = known = whole or self._known
            for r, deed in known.items():
                if self._heard.get(r, (-1, 0.0))[0] != deed["beat"]:
                    self._heard[r] = (deed["beat"], self._clock.seconds())
        return known

    def beat(self) -> None:
        """What is done now and then, whatever this rank is busy with: tell the others, and hear of them."""
        with self._looking:
            self._clock.seconds()
        self.publish()
        self.seek()
        self._news = self._news or self._reported()
        if self._news is None and (gone := self._gone([])) and self._notes.answers():  # so who has left is known
            self._news = self._lost(gone)

    def seek(self) -> bool:
        """Watch the process that is this rank's to watch, if that has come; False if it has not."""
        rank = self._guard.seeks
        if rank is not None:
            door = self._notes.find(f"door/{rank}")
            if not isinstance(door, dict):
                return False
            with self._looking:
                if not self._stop.is_set():
                    self._guard.watch(door.get("door"))
        return True

    def publish(self) -> None:
        """Tell the others what this rank last did if they do not know yet, and inside a call that it is still there."""
        if self._deed is not self._published or self._deed["inside"]:
            self._notes.leave_newest(f"deed/{self._rank}", self._latest_deed)

    def _latest_deed(self) -> dict[str, Any]:
        self._published = deed = self._deed
        self._beat += 1
        return {**deed, "beat": self._beat, "stance": self._stance and self._stance.to_dict()}


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
    if not deed or not deed["text"]:
        return "has made no call yet"
    verb = "is in" if deed["inside"] else "last finished"
    return f"{verb} {deed['text']} ({deed['call']}made {time.time() - deed['since']:.1f} s ago)"
