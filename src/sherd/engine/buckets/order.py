"""One order of things that several ranks list, each its own part of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Thing = TypeVar("Thing", bound=Hashable)


def merged(orders: Iterable[Sequence[Thing]]) -> list[Thing]:
    """Everything in these lists: in the order of the first, with what only later ones have after what precedes it
    there."""
    first = object()
    following: dict[object, Thing | None] = {first: None}
    for order in orders:
        before: object = first
        for thing in order:
            if thing not in following:
                following[thing], following[before] = following[before], thing
            before = thing
    found: list[Thing] = []
    at = following[first]
    while at is not None:
        found.append(at)
        at = following[at]
    return found
