"""What the batch at hand counts: its share beside those of the other ranks, which is 1 except where an epoch ends
unevenly, and its samples.

It is one per process, because a batch may go through several models. A *pass* is one loop over a loader. Its last batch
is *at hand* until the pass ends or nobody holds it any more, as after a `break`.

Several passes may be under way. One that began after another had yielded its batch is *inside* that one: an evaluation
in the body of a training loop. While it lasts, its batch is the one at hand. Passes that take turns, as those of a
`zip`, are beside each other: then the share is that of the batch which was yielded last, and nobody can say whose
samples are meant where they differ.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from typing import Any, NamedTuple

log = logging.getLogger("sherd")

_now = itertools.count(1)  # orders what passes do


class Counts(NamedTuple):
    """Samples of some batches of one loader on this rank."""

    loaded: int = 0
    """as they were loaded, repeated ones too"""
    counted: int = 0
    """the first so many of them are this rank's own; the rest are repeated"""

    def plus(self, other: Counts) -> Counts:
        return Counts(self.loaded + other.loaded, self.counted + other.counted)


class Epoch:
    """All batches that a pass has yielded. It is remembered when that is over, until the loader's next one."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.at = 0
        """when the last of them was yielded"""


class Pass:
    """One loop over a loader. Whoever iterates holds it."""

    def __init__(self, loader: Any = None) -> None:
        self.share = 1.0
        self.batch: Counts | None = None
        """the one at hand"""
        self.epoch = Epoch()
        self.began = next(_now)
        self._loader = None if loader is None else weakref.ref(loader)
        self._unused = False  # whether nobody asked for the share of the batch at hand yet
        self._asked = False  # whether somebody did for some batch
        _passes.add(self)

    def is_over(self, loader: Any) -> bool:
        """Whether it is one over this loader."""
        return self._loader is not None and self._loader() is loader

    def yields(self, share: float, samples: int = 1) -> None:
        """The batch that is about to be yielded counts `share`, and has so many `samples`, as loaded.

        All of them are repeated where `share` is 0.
        """
        if share != 1.0 and self._unused and self._asked:
            log.warning(
                "a smaller last batch was fetched before the one before it was used, so that its share (%.3g) goes to "
                "the wrong backward; fetch one batch at a time, or write drop_last=True",
                share,
            )
        self.share = share
        self.batch = Counts(samples, samples if share else 0)
        self.epoch.counts = self.epoch.counts.plus(self.batch)
        self.epoch.at = next(_now)
        self._unused = True
        loader = None if self._loader is None else self._loader()
        if loader is not None:
            _epochs[loader] = self.epoch

    def ends(self) -> None:
        """It has no batch at hand any more."""
        self.batch = None
        self._unused = False

    def asked(self) -> None:
        """The share of the batch at hand is used."""
        self._asked |= self._unused
        self._unused = False


_passes: weakref.WeakSet[Pass] = weakref.WeakSet()
_epochs: weakref.WeakKeyDictionary[Any, Epoch] = weakref.WeakKeyDictionary()  # the last of each loader


def current() -> float:
    """The share of the batch at hand."""
    for each in _under_way():
        each.asked()
    newest = _newest()
    return 1.0 if newest is None else newest.share


def at_hand() -> int | None:
    """How many samples of the batch at hand count: 0 if it is only repeated. None if there is no such batch."""
    newest = _newest()
    return None if newest is None or newest.batch is None else newest.batch.counted


def batches(loader: Any = None) -> list[Counts]:
    """The batches that may be meant by "the batch at hand", the last one first: that of `loader`, or of any."""
    if loader is not None:
        return [each.batch for each in _under_way() if each.batch is not None and each.is_over(loader)][:1]
    return [each.batch for each in _innermost() if each.batch is not None]


def epoch(loader: Any) -> Counts:
    """All batches of the last loop over `loader`, so far."""
    found = _epochs.get(loader)
    return Counts() if found is None else found.counts


def matching(rows: int, loader: Any = None) -> set[Counts]:
    """What so many rows may be those of: of `loader`, or of any; none if nothing is as long.

    Batches at hand are tried first, with the epochs of loops inside theirs; then the last epoch of every loader, and
    the batches of the loops around.
    """
    if loader is not None:
        return {counts for counts in (*batches(loader), epoch(loader)) if counts.loaded == rows}
    inner = _innermost()
    since = min((each.epoch.at for each in inner), default=0)
    near = [each.batch for each in inner] + [each.counts for each in _epochs.values() if each.at >= since]
    far = [each.batch for each in _under_way()] + [each.counts for each in _epochs.values()]
    for known_ones in (near, far):
        found = {counts for counts in known_ones if counts is not None and counts.loaded == rows}
        if found:
            return found
    return set()


def _under_way() -> list[Pass]:
    """Passes with a batch at hand, the one that yielded last first."""
    return sorted((each for each in _passes if each.batch is not None), key=lambda each: -each.epoch.at)


def _innermost() -> list[Pass]:
    """Those of them that have no other inside."""
    passes = _under_way()
    return [each for each in passes if not any(other.began > each.epoch.at for other in passes)]


def _newest() -> Pass | None:
    return next(iter(_under_way()), None)
