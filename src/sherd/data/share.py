"""How much the batch at hand counts beside those of the other ranks: 1, except where an epoch ends unevenly.

It is one number per process, because a batch may go through several models. Whoever yields a batch says what it counts;
of several loaders that are under way, the one that yielded last is right, until it is done.
"""

from __future__ import annotations

import weakref
from typing import Any

_shares: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()  # who yielded last comes last


def current() -> float:
    """The share of the batch at hand."""
    return next(reversed(list(_shares.values())), 1.0)


def use(value: float, by: Any) -> None:
    """The batch that `by` is about to yield counts `value`, until it yields another, is done or is gone."""
    done(by)
    _shares[by] = value


def done(by: Any) -> None:
    """`by` has no batch at hand any more."""
    _shares.pop(by, None)
