"""Sleeping until other ranks are far enough.

A rank that sleeps says which flags it needs and how far, and sleeps on a word of its own, its *bell*. Whoever raises
the last of these flags rings it: a rank wakes once, when everything it needs is there, however many it waited for.

No wake-up is missed. A rank says what it needs before it looks a last time, and another raises its flag before it looks
who sleeps. With a full barrier between the two steps on either side, at least one of them sees the other; so do two
ranks that raise the last two flags at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from sherd.comm.host import futex
from sherd.comm.host.memory import SharedBlock

BED_BYTES = 64
"""Of each rank: its bell, the value that it needs, and the first of the flags that must reach it."""


class Sleepers:
    """One rank's view of who sleeps. `posted` and `done` are the flags of all ranks; all others have one reader."""

    def __init__(self, block: SharedBlock, start: int, rank: int, posted: Sequence[int], done: Sequence[int]) -> None:
        world = len(posted)
        self._words = block.words()
        self._address = block.address
        self._rank = rank
        self._others = [r for r in range(world) if r != rank]
        self._sets = {index: flags for flags in (posted, done) for index in flags}
        self._beds = [(start + BED_BYTES * r) // 8 for r in range(world)]
        asleep = start + BED_BYTES * world
        self.asleep = memoryview(block.memory)[asleep : asleep + world]

    @staticmethod
    def nbytes(world: int) -> int:
        return (BED_BYTES + 8) * world

    def sleep(self, indices: Sequence[int], target: int, seconds: float) -> None:
        """Sleep until every flag in `indices`, all of one set, has reached `target`, for at most `seconds`."""
        words, bed = self._words, self._beds[self._rank]
        words[bed + 1], words[bed + 2] = target, indices[0]
        bell = words[bed]
        if not futex.STORES_IN_ORDER:
            futex.fence()
        self.asleep[self._rank] = 1
        try:
            with futex.barrier:
                pass
            for index in indices:
                if words[index] < target:
                    futex.wait(self._address + 8 * bed, bell, seconds)
                    break
        finally:
            self.asleep[self._rank] = 0

    def wake(self, index: int, value: int) -> None:
        """This rank has raised its flag at `index` to `value`, then a barrier: wake those that need nothing more."""
        words, asleep = self._words, self.asleep
        for rank in self._others:
            bed = self._beds[rank]
            if not asleep[rank] or value < (target := words[bed + 1]):
                continue
            first = words[bed + 2]
            flags = self._sets.get(first)
            if flags is None:
                needed = first == index
            else:
                needed = index in flags and all(words[flags[r]] >= target for r in self._others if r != rank)
            if needed:
                words[bed] += 1
                futex.wake(self._address + 8 * bed)
