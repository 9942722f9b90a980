"""Waiting over torch.distributed without hanging and without silence.

The backend's own waits end in an error that names no rank, or not at all. Here every rank publishes what it last did
(see `activity`). A rank that waits checks every tenth of a second whether a peer has died, left or failed, and knows
whom to name when it gives up. A rank that was busy meanwhile gets the error in its next call, even if what others sent
before they gave up would be enough to complete it.
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

from sherd.comm.c10d.activity import Activity
from sherd.comm.closing import CLOSED_MEANWHILE
from sherd.comm.meeting.guard import Guard
from sherd.comm.meeting.notes import Notes
from sherd.comm.meeting.peers import Peers
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
CIRCLE_EVERY = 0.5  # seconds before the first search for a circle; later ones are further apart


Attempt = Callable[[float], bool]
"""attempt(seconds): whether something is complete, after at most that long."""
Slow = Callable[[], Sequence[int]]
"""The ranks whose data is on its way, once all ranks have reached a call."""
TakeStance = Callable[[], Stance | None]
"""What this rank waits for, if others could be waiting for it in a circle."""


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
        """`guard` already watches the previous rank, unless that is among the peers."""
        self._notes = Notes(store, seal)
        self._pid = os.getpid()
        self._rank = rank
        self._names = names
        self._peers = peers or Peers()
        before, after = (rank - 1) % len(names), (rank + 1) % len(names)
        if guard is None:
            guard = Guard(store, None if before in self._peers else before, after not in self._peers)
            self._notes.leave(f"door/{rank}", {"door": guard.door})
        self._guard = guard
        # One thread publishes while another waits; either may be interrupted by what closes this.
        self._lock = threading.RLock()
        self._options = options
        self._owner: int | None = threading.get_ident()  # the thread that makes the calls; None once others do too
        self._news: CommError | None = None  # what another rank has reported while this one was busy
        self._beat_every = min(PUBLISH_EVERY, options.warn_seconds / 3)
        self.activity = Activity(self._notes, rank, names, self._beat_every, self._lock)
        self._stop = threading.Event()
        # By a weak reference: the thread must not keep alive what nothing else refers to.
        arguments = (weakref.ref(self), self._stop, self._beat_every)
        threading.Thread(target=_beat_forever, args=arguments, name="sherd-watchdog", daemon=True).start()

    # ---------------------------------------------------------------- what this rank does

    def enter(self, number: int, text: str, message: bool = False) -> dict[str, Any]:
        """Note a call. `number` counts the collectives: it shows which ranks are behind."""
        if self._news is not None:
            raise type(self._news)(str(self._news), self._news.ranks)  # a new one: its traceback holds the caller
        if threading.get_ident() != self._owner:
            self._owner = self.activity.stance = None  # another thread may do what this one waits for
        return self.activity.enter(number, text, message)

    def use_here(self) -> None:
        """The calls now come from this thread; threads take turns."""
        self._owner = threading.get_ident()

    def report(self, error: CommError) -> CommError:
        """Tell the others why this rank gives up. The first report stands."""
        self._notes.report(error, self._rank)
        with contextlib.suppress(ConfigError):  # the event stream may be closed, and what went wrong matters more
            faults.emit_fault(error)
        return error

    def close(self) -> None:
        """Say that this rank has left. A forked child says nothing: the rank itself is still there."""
        if not self._stop.is_set() and os.getpid() == self._pid:
            self._stop.set()
            self.activity.leave()
            self._notes.mark("left")
            with self._lock:
                self._peers.close()
                self._guard.close()
            self._notes.close()

    # ---------------------------------------------------------------- waiting

    def wait(self, work: dist.Work, stance: TakeStance = lambda: None) -> None:
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
        self, attempt: Attempt, needed: Sequence[int], slow: Slow = tuple, stance: TakeStance = lambda: None
    ) -> None:
        """Repeat `attempt(seconds)` until it is True, for as long as the `needed` ranks may still do their part."""
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
            # A rank that has left may have done its part of this first, and the rest may be on its way.
            gone = self._gone(needed)
            if (gone or self._reported()) and not attempt(PATIENCE):
                raise self._reported() or self._lost(gone)
            if not listened:
                listened = bool(self.activity.read())  # from now on it shows who is silent
            waited = waiting.seconds()
            if waited > circle_at:
                circle_at = max(waited + CIRCLE_EVERY, 1.5 * waited)
                self._look_for_a_circle(stance())
            if waited > limit(self._options.timeout):
                raise self._timed_out(waited, self.activity.missing(needed) or slow())
            if waited > warn_at:
                self._warn(waited, self.activity.missing(needed) or slow())
                warn_at = 2 * waited

    # ---------------------------------------------------------------- what may have gone wrong

    def _reported(self) -> CommError | None:
        """What another rank has reported, as an error of this one."""
        return self._notes.reported(self._names, self._rank)

    def _gone(self, needed: Sequence[int]) -> list[int]:
        """Ranks that died, and those among `needed` that left."""
        with self._lock:
            dead = [*self._peers.dead(), *self._guard.dead()]
        if not dead and (not needed or not self._notes.marked("left")):
            return []
        left = {r: activity for r, activity in self.activity.read().items() if activity["left"]}
        owing = [r for r, activity in left.items() if r in needed and self._owes(activity)]
        return [r for r in range(len(self._names)) if r in owing or (r in dead and r not in left)]

    def _owes(self, activity: dict[str, Any]) -> bool:
        """Whether a rank that has left did not do its part of the collective that this one is in. If it did, what it
        sent may still be on a slow network."""
        mine = self.activity.mine
        return not mine.get("call") or activity["number"] < mine["number"] or not activity.get("through")

    def explain(self, error: RuntimeError, needed: Sequence[int]) -> CommError:
        """The backend has lost a connection: find out to whom. Its error comes before the process is gone."""
        if self._stop.is_set():
            return CommClosed(CLOSED_MEANWHILE)
        peers = [error.peer] if isinstance(error, faults.LinkBroken) else []
        looking, enough = Stopwatch(), EXPLAIN_WITHIN if peers else EXPLAIN_WITHIN + 3 * self._beat_every
        while looking.seconds() < enough:
            gone = self._gone(needed)
            reported = self._reported()  # after that: a rank that leaves because of an error says so first
            if reported is not None:
                return reported
            if gone:
                return self._lost(gone)
            self.activity.read()
            time.sleep(0.05)
        peers = peers or self.activity.silent(needed) or self.activity.missing(needed)
        who = ", ".join(self._names[r] for r in peers) or "a peer"
        end = f"the connection to {who} was lost: {str(error).splitlines()[0]}"
        return self.report(faults.lost([end], "; ".join(self.activity.everyone()), peers))

    def _look_for_a_circle(self, mine: Stance | None) -> None:
        """Take the stance, if only the waiting thread makes this rank's calls, and raise if it is in a circle."""
        if mine is None or self._owner != threading.get_ident():
            return
        self.activity.stance = mine
        if mine.kind == COLLECTIVE:  # a circle has a message in it: the rank that waits for that will report it
            return
        known = self.activity.read().items()
        stances = {r: Stance.from_dict(activity["stance"]) for r, activity in known if activity.get("stance")}
        stances[self._rank] = mine
        if ranks := circle(self._rank, stances):
            sides = deadlock.sides(ranks, stances, self._names)
            raise self.report(faults.deadlocked(sides, sorted(ranks)))

    def _lost(self, ranks: Sequence[int]) -> CommError:
        known = self.activity.read()
        ends = []
        for r in ranks:
            left = known.get(r, {}).get("left")
            with self._lock:
                end = "left" if left else self._peers.how_it_ended(r) if r in self._peers else "ended"
            ends.append(f"{self._names[r]} {end}; it {self.activity.text(r)}")
        return self.report(faults.lost(ends, f"{self._names[self._rank]} {self.activity.text(self._rank)}", ranks))

    def _timed_out(self, seconds: float, missing: Sequence[int]) -> CommError:
        late = [self._names[r] for r in missing]
        return self.report(faults.timed_out(late, seconds, self.activity.everyone(), missing))

    def _warn(self, seconds: float, missing: Sequence[int]) -> None:
        late = {r: f"{self._names[r]}; it {self.activity.text(r)}" for r in missing}
        most = limit(self._options.timeout)
        faults.warn_late(self._names[self._rank], late, seconds, self.activity.mine["text"], most)

    # ---------------------------------------------------------------- beats

    def beat(self) -> None:
        """What is done now and then, whatever this rank is busy with: publish its activity, and look for faults."""
        self.activity.tick()
        self.activity.publish()
        self.seek()
        self._news = self._news or self._reported()
        if self._news is None and (gone := self._gone([])) and self._notes.answers():  # so it is known who has left
            self._news = self._lost(gone)

    def seek(self) -> bool:
        """Start watching the process that is this rank's to watch; False if that has not arrived yet."""
        rank = self._guard.seeks
        if rank is not None:
            door = self._notes.find(f"door/{rank}")
            if not isinstance(door, dict):
                return False
            with self._lock:
                if not self._stop.is_set():
                    self._guard.watch(door.get("door"))
        return True


def _beat_forever(watchdog: weakref.ref[Watchdog], stop: threading.Event, seconds: float) -> None:
    """Beat now and then; more often until the rank to be watched has arrived, which is soon."""
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
