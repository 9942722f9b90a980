"""How much the batch at hand counts beside those of the other ranks: 1, except where an epoch ends unevenly.

It is one number per process, because a batch may go through several models. Whoever yields a batch says what it counts;
of several loaders that are under way, the one that yielded last is right, until it is done.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

log = logging.getLogger("sherd")

_shares: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()  # who yielded last comes last


_unused: weakref.WeakSet[Any] = weakref.WeakSet()  # those whose batch at hand was not asked for yet
_asked: weakref.WeakSet[Any] = weakref.WeakSet()  # those of which some batch was


def current() -> float:
    """The share of the batch at hand."""
    for by in list(_unused):
        _asked.add(by)
    _unused.clear()
    return next(reversed(list(_shares.values())), 1.0)


def use(value: float, by: Any) -> None:
    """The batch that `by` is about to yield counts `value`, until it yields another, is done or is gone."""
    if value != 1.0 and by in _unused and by in _asked:
        log.warning(
            "a smaller last batch was fetched before the one before it was used, so that its share (%.3g) goes to the "
            "wrong backward; fetch one batch at a time, or write drop_last=True",
            value,
        )
    done(by)
    _shares[by] = value
    _unused.add(by)


def done(by: Any) -> None:
    """`by` has no batch at hand any more."""
    _shares.pop(by, None)
    _unused.discard(by)
