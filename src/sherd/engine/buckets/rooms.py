"""Memory for one gradient after the other, which a program may keep.

In plain torch a gradient that a program keeps (`state["last"] = p.grad`) stays what it was after `zero_grad()`. Here
gradients are shown where they were summed, so memory that was handed out and is still held is not written again: the
next gradient gets another *room*. Most programs keep nothing, and then there is one room per bucket for good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_C: Any = torch._C
MAX_HELD = 4
"""Rooms per bucket that are watched for becoming free again. A program that keeps more of them keeps them for long."""


class Room:
    """Memory for what is kept of a bucket: `whole`, and parts of it that are used again and again.

    `sum` is what is reduced into, `slice` what this rank owns of it, and `views` are the places of the members in it,
    if they have any. The memory has a storage of its own, of which torch counts the users: more than at the beginning,
    and it is held.
    """

    def __init__(self, whole: Tensor, sum: Tensor, slice: Tensor, views: Sequence[Tensor] = ()) -> None:
        self.whole = whole
        self.sum = sum
        self.slice = slice
        self.views = views
        self._storage: int = whole.untyped_storage()._cdata
        self._ours = self._users()

    def held(self) -> bool:
        """Whether somebody holds a part of it that was handed out."""
        return self._users() > self._ours

    def _users(self) -> int:
        return 0 if self.whole.is_meta else int(_C._storage_Use_Count(self._storage))


class Rooms:
    """The rooms of one bucket. `make` allocates one more."""

    def __init__(self, first: Room, make: Callable[[], Room]) -> None:
        self._first = first
        self._make = make
        self._more: list[Room] = []
        self.current = first

    def choose(self) -> Room:
        """A room that nobody holds, for the next gradient; the first one if possible, where peers may read in place."""
        rooms = [self._first, *self._more]
        self.current = next((room for room in rooms if not room.held()), None) or self._make()
        others = [room for room in self._more if room is not self.current and room.held()]
        self._more = others[-MAX_HELD:]
        if self.current is not self._first:
            self._more.append(self.current)
        return self.current

    @property
    def more_bytes(self) -> int:
        """Bytes of all but the first."""
        return sum(room.whole.nbytes for room in self._more)
