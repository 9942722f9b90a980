"""The weight of the current batch, and how many samples it has.

The weight is how much a rank's batch counts against those of the other ranks: 1, except where an epoch ends unevenly.
There is one per process, because a batch may go through several models. A *pass* is one loop over a loader. The last
batch it yielded is *current* until the pass ends or its iterator is dropped, as after a `break`.

Several passes may be running. One that began after another had yielded its batch is *nested* in it: an evaluation in
the body of a training loop. While it lasts, its batch is the current one. Passes that alternate, as in a `zip`, are
side by side: the weight is then that of the batch yielded last, and where their sample counts differ the caller has to
say which loader is meant.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from typing import Any, NamedTuple

log = logging.getLogger("sherd")

_now = itertools.count(1)  # puts the events of all passes in order


class Counts(NamedTuple):
    """Samples of some batches of one loader on this rank."""

    loaded: int = 0
    """all that were loaded, repeated ones included"""
    counted: int = 0
    """how many of them, from the first on, are this rank's own; the rest are repeats"""

    def plus(self, other: Counts) -> Counts:
        return Counts(self.loaded + other.loaded, self.counted + other.counted)


class Pass:
    """One loop over a loader, held by its iterator."""

    def __init__(self, loader: Any = None) -> None:
        self.weight = 1.0
        self.batch: Counts | None = None
        """the current one"""
        self.total = Counts()
        """of all batches so far"""
        self.at = 0
        """when the last one was yielded"""
        self.began = next(_now)
        self._loader = None if loader is None else weakref.ref(loader)
        self._unused = False  # nobody has asked for the weight of the current batch yet
        self._asked = False  # somebody has, for some batch of this pass
        _passes.add(self)

    def is_over(self, loader: Any) -> bool:
        """Whether it loops over this loader."""
        return self._loader is not None and self._loader() is loader

    def yields(self, weight: float, samples: int = 1) -> None:
        """A batch with this weight and this many loaded samples is about to be yielded. Weight 0: all are repeats."""
        if weight != 1.0 and self._unused and self._asked:
            log.warning(
                "a smaller last batch was fetched before the previous one was used, so its weight (%.3g) goes to the "
                "wrong backward; fetch one batch at a time, or write drop_last=True",
                weight,
            )
        self.weight = weight
        self.batch = Counts(samples, samples if weight else 0)
        self.total = self.total.plus(self.batch)
        self.at = next(_now)
        self._unused = True
        loader = None if self._loader is None else self._loader()
        if loader is not None:
            _totals[loader] = self.total, self.at

    def ends(self) -> None:
        """It has no current batch any more."""
        self.batch = None
        self._unused = False

    def asked(self) -> None:
        """The weight of the current batch has been used."""
        self._asked |= self._unused
        self._unused = False


_passes: weakref.WeakSet[Pass] = weakref.WeakSet()
_totals: weakref.WeakKeyDictionary[Any, tuple[Counts, int]] = weakref.WeakKeyDictionary()
"""Of the last pass over each loader: all of its batches so far, and when the last one was yielded."""


def current() -> float:
    """The weight of the current batch: 0 if it only repeats samples, 1 if there is no current batch."""
    running = _running()
    for each in running:
        each.asked()
    return running[0].weight if running else 1.0


def samples() -> int | None:
    """How many samples of the current batch count: 0 if it only repeats some. None if there is no current batch."""
    newest = _newest()
    return None if newest is None or newest.batch is None else newest.batch.counted


def batches(loader: Any = None) -> list[Counts]:
    """The batches that "the current batch" may mean, the last one first: that of `loader`, or of any loader."""
    if loader is not None:
        return [each.batch for each in _running() if each.batch is not None and each.is_over(loader)][:1]
    return [each.batch for each in _innermost() if each.batch is not None]


def total(loader: Any) -> Counts:
    """All batches of the last pass over `loader`, so far."""
    return _totals.get(loader, (Counts(), 0))[0]


def matching(rows: int, loader: Any = None) -> set[Counts]:
    """The batches or passes, of `loader` or of any loader, that have this many rows; empty if there is none.

    Current batches come first, with the passes nested in theirs; then the last pass over every loader, and the batches
    of the enclosing loops.
    """
    if loader is not None:
        return {counts for counts in (*batches(loader), total(loader)) if counts.loaded == rows}
    inner = _innermost()
    since = min((each.at for each in inner), default=0)
    near = [each.batch for each in inner] + [counts for counts, at in _totals.values() if at >= since]
    far = [each.batch for each in _running()] + [counts for counts, _ in _totals.values()]
    for candidates in (near, far):
        found = {counts for counts in candidates if counts is not None and counts.loaded == rows}
        if found:
            return found
    return set()


def _running() -> list[Pass]:
    """Passes with a current batch, the one that yielded last first."""
    if not _passes:
        return []
    return sorted((each for each in _passes if each.batch is not None), key=lambda each: -each.at)


def _innermost() -> list[Pass]:
    """Those with no other nested in them."""
    passes = _running()
    return [each for each in passes if not any(other.began > each.at for other in passes)]


def _newest() -> Pass | None:
    return next(iter(_running()), None)
