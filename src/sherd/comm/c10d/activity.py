"""What every rank last did, as the ranks tell each other through the store.

A rank publishes its activity once a second, even while it is busy elsewhere, with a number that rises each time: its
*beat*. A rank whose beats stop while it is in a call is suspended or cut off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from sherd.comm.meeting.notes import Notes
from sherd.comm.waiting.deadlock import Stance
from sherd.comm.waiting.patience import Stopwatch

FIELDS = {"number", "text", "since", "inside", "left", "beat"}


class Activity:
    """What the ranks of a communicator last did, seen from rank `rank`. `lock` is held while what is known changes."""

    def __init__(self, notes: Notes, rank: int, names: Sequence[str], beat_every: float, lock: threading.RLock) -> None:
        self._notes = notes
        self._rank = rank
        self._names = names
        self._beat_every = beat_every
        self._lock = lock
        self.mine: dict[str, Any] = {"number": 0, "text": "", "since": time.time(), "inside": False, "left": False}
        self.stance: Stance | None = None  # the last that this rank took, see `deadlock`
        self._published: dict[str, Any] = {}
        self._beat = 0
        self._known: dict[int, dict[str, Any]] = {}
        self._heard: dict[int, tuple[int, float]] = {}  # the last beat of every rank, and when it was new here
        self._clock = Stopwatch(beat_every)  # read with every beat of this rank: they pause together

    # ---------------------------------------------------------------- of this rank

    def enter(self, number: int, text: str, message: bool) -> dict[str, Any]:
        """Note a call. `number` counts the collectives: it shows which ranks are behind."""
        call = "" if message else f"call {number}, "
        self.mine = {"number": number, "text": text, "since": time.time(), "inside": True, "left": False, "call": call}
        return self.mine

    def finish(self, entered: dict[str, Any]) -> None:
        if self.mine is entered:
            self.mine = {**entered, "inside": False}

    def leave(self) -> None:
        self.mine = {**self.mine, "inside": False, "left": True, "through": not self.mine["inside"]}
        self.publish()

    def publish(self) -> None:
        """Publish what this rank last did if that is new, and inside a call that it is still there."""
        if self.mine is not self._published or self.mine["inside"]:
            self._notes.leave_newest(f"activity/{self._rank}", self._newest)

    def tick(self) -> None:
        """To be called with every beat of this rank."""
        with self._lock:
            self._clock.seconds()

    def _newest(self) -> dict[str, Any]:
        self._published = mine = self.mine
        self._beat += 1
        return {**mine, "beat": self._beat, "stance": self.stance and self.stance.to_dict()}

    # ---------------------------------------------------------------- of all ranks

    def read(self) -> dict[int, dict[str, Any]]:
        """What the ranks have published, as far as it is known."""
        keys = {f"activity/{r}": r for r in range(len(self._names))}
        with self._lock:
            found = self._notes.find_some(keys)
            # Without a token anyone may have written one, in any form.
            whole = {keys[key]: each for key, each in found.items() if isinstance(each, dict) and each.keys() >= FIELDS}
            self._known = known = whole or self._known
            for r, each in known.items():
                if self._heard.get(r, (-1, 0.0))[0] != each["beat"]:
                    self._heard[r] = (each["beat"], self._clock.seconds())
        return known

    def missing(self, needed: Sequence[int]) -> list[int]:
        """Who is waited for: the peer of a message, or the ranks that have not reached this collective."""
        if len(needed) == 1:
            return list(needed)
        known = self.read()
        if self._notes.silent_for():
            return [r for r in needed if r != self._rank]  # nothing is known of anyone
        number = self.mine["number"]
        others = [r for r in range(len(self._names)) if r != self._rank]
        return [r for r in others if known.get(r, {"number": 0})["number"] < number] or self.silent(needed)

    def silent(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that were in a call and whose beats have stopped: they are suspended, or cut off."""
        silence = {r: self._silence(r) for r in list(self._heard) if self._known[r]["inside"]}
        return [r for r in ranks if r != self._rank and silence.get(r, 0.0) > 2 * self._beat_every]

    def _silence(self, rank: int) -> float:
        with self._lock:
            return self._clock.seconds() - self._heard[rank][1]

    # ---------------------------------------------------------------- in words

    def everyone(self) -> list[str]:
        """What every rank last did."""
        self.read()
        everyone = [f"{name} {self.text(r)}" for r, name in enumerate(self._names)]
        if silence := self._notes.silent_for():
            everyone.insert(0, f"{self._names[self._rank]} has had no answer from the store for {silence:.1f} s")
        return everyone

    def text(self, rank: int) -> str:
        """What a rank last did, as far as it is known."""
        words = _words(self.mine if rank == self._rank else self._known.get(rank))
        if self.silent([rank]):
            words += f", and was last heard from {self._silence(rank):.1f} s ago"
        return words


def _words(activity: dict[str, Any] | None) -> str:
    if not activity or not activity["text"]:
        return "has made no call yet"
    verb = "is in" if activity["inside"] else "last finished"
    return f"{verb} {activity['text']} ({activity['call']}made {time.time() - activity['since']:.1f} s ago)"
