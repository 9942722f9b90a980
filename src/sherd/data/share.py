"""What the batch at hand counts: its share beside those of the other ranks, which is 1 except where an epoch ends
unevenly, and its samples.

It is one per process, because a batch may go through several models. Whoever yields a batch says what it counts; of
several loaders that are under way, the one that yielded last is right, until it is done.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any, NamedTuple

log = logging.getLogger("sherd")


class Tally(NamedTuple):
    """Samples of some batches of one loader on this rank."""

    loaded: int = 0
    """as they were loaded, repeated ones too"""
    counted: int = 0
    """the first so many of them are this rank's own; the rest are repeated"""

    def plus(self, other: Tally) -> Tally:
        return Tally(self.loaded + other.loaded, self.counted + other.counted)


class Yielded(NamedTuple):
    """What is known of the batch that a loader yielded last."""

    share: float
    batch: Tally | None
    epoch: Tally
    """of all its batches since the epoch began"""


_at_hand: weakref.WeakKeyDictionary[Any, Yielded] = weakref.WeakKeyDictionary()  # who yielded last comes last
_last: Yielded | None = None
_ended: Tally | None = None  # of the epoch that ended last, if no batch came since

_unused: weakref.WeakSet[Any] = weakref.WeakSet()  # those whose batch at hand was not asked for yet
_asked: weakref.WeakSet[Any] = weakref.WeakSet()  # those of which some batch was


def current() -> float:
    """The share of the batch at hand."""
    for by in list(_unused):
        _asked.add(by)
    _unused.clear()
    at_hand = _newest()
    return 1.0 if at_hand is None else at_hand.share


def yielded() -> Yielded | None:
    """What is known of the batch at hand or, between loops, of the one that was so last; None before the first."""
    return _newest() or _last


def tallies() -> list[Tally]:
    """What rows may be those of: the epoch that has just ended, and the batch at hand."""
    newest = _newest()
    return [tally for tally in (_ended, newest and newest.batch) if tally is not None]


def use(value: float, by: Any, samples: int | None = None) -> None:
    """The batch that `by` is about to yield counts `value`, until it yields another, is done or is gone.

    It has so many `samples`, as loaded; all of them are repeated where `value` is 0.
    """
    global _last, _ended
    if value != 1.0 and by in _unused and by in _asked:
        log.warning(
            "a smaller last batch was fetched before the one before it was used, so that its share (%.3g) goes to the "
            "wrong backward; fetch one batch at a time, or write drop_last=True",
            value,
        )
    before = _at_hand.get(by)
    done(by)
    batch = None if samples is None else Tally(samples, samples if value else 0)
    epoch = before.epoch if before else Tally()
    _at_hand[by] = _last = Yielded(value, batch, epoch.plus(batch or Tally()))
    _ended = None
    _unused.add(by)


def done(by: Any) -> None:
    """`by` has no batch at hand any more."""
    global _ended
    last = _at_hand.pop(by, None)
    if last is not None:
        _ended = last.epoch
    _unused.discard(by)


def _newest() -> Yielded | None:
    return next(reversed(list(_at_hand.values())), None)
