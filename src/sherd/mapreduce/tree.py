"""The order in which results are merged: a binary tree over the chunks, whoever computed them.

A *node* (level, index) covers the chunks from index * 2^level to (index + 1) * 2^level - 1; a chunk is a node of level
0. Two nodes are merged only if they are the halves of a larger one, the left one first. Where a half has no chunks,
the other half is the whole. So how chunks are merged depends on which there are, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
Node = tuple[int, int]

MOST_CHUNKS = 256
"""By default: enough to deal evenly to dozens of ranks, and a bound on the partial results that are held."""


def default_chunk(items: int | None) -> int:
    """Items per chunk, by the number of items alone; None if that is not known."""
    return 1 if items is None else max(1, -(-items // MOST_CHUNKS))


def chunks_in(items: int, chunk: int) -> int:
    """How many chunks there are."""
    return -(-items // chunk)


def items_of(number: int, chunk: int, items: int | None) -> range:
    """The items of a chunk; the last one may have fewer."""
    stop = (number + 1) * chunk
    return range(number * chunk, stop if items is None else min(stop, items))


class Forest(Generic[T]):
    """Results of some chunks, merged as far as the tree allows. The order in which they are added does not matter."""

    def __init__(self, merge: Callable[[T, T], T]) -> None:
        self.nodes: dict[Node, T] = {}
        self._merge = merge

    def add(self, node: Node, result: T) -> None:
        """Add the result of a chunk or of a larger node. Nothing may be added twice."""
        level, index = node
        while (level, index ^ 1) in self.nodes:
            other = self.nodes.pop((level, index ^ 1))
            result = self._merge(other, result) if index & 1 else self._merge(result, other)
            level, index = level + 1, index >> 1
        self.nodes[level, index] = result

    def total(self) -> T | None:
        """All of them merged, once there are no more; None if there are none."""
        while len(self.nodes) > 1:
            lowest = min(level for level, _ in self.nodes)
            # Those below it are merged already, so a half that is not there now has no chunks.
            for level, index in [node for node in self.nodes if node[0] == lowest]:
                if (level, index) in self.nodes:
                    self.add((level + 1, index >> 1), self.nodes.pop((level, index)))
        return next(iter(self.nodes.values()), None)
