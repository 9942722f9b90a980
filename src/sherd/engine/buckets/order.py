"""One order of things that several ranks list, each its own part of them."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

Thing = TypeVar("Thing", bound=Hashable)


def merged(orders: Iterable[Sequence[Thing]]) -> list[Thing]:
    """Everything in these lists, once, in an order that keeps that of each list, if there is one.

    What could come next in several lists comes in the order in which it is first listed; so does what the lists have in
    different orders.
    """
    places: dict[Thing, int] = {}
    after: dict[Thing, set[Thing]] = {}
    waits: dict[Thing, int] = {}
    for order in orders:
        for thing in order:
            places.setdefault(thing, len(places))
        for one, next_one in pairwise(order):
            following = after.setdefault(one, set())
            if next_one not in following:
                following.add(next_one)
                waits[next_one] = waits.get(next_one, 0) + 1
    things = list(places)
    free = [place for place, thing in enumerate(things) if not waits.get(thing)]
    found: dict[Thing, None] = {}
    unplaced = 0  # everything before this place is found
    while len(found) < len(things):
        while things[unplaced] in found:
            unplaced += 1
        thing = things[heapq.heappop(free) if free else unplaced]
        if thing in found:
            continue
        found[thing] = None
        for each in after.get(thing, ()):
            waits[each] -= 1
            if not waits[each]:
                heapq.heappush(free, places[each])
    return list(found)
