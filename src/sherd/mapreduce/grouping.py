"""Partial results by key, and the reduce phase: keys go to the ranks that own them, which merge what belongs to them.

No rank holds the partial results of all keys: each receives those of its own keys, from one rank after another. The
last results are then gathered on every rank.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from sherd.comm import Communicator
from sherd.comm.parcels import exchange_objects
from sherd.errors import ChunkFailed
from sherd.mapreduce.keys import Key, owner
from sherd.mapreduce.mapping import LONGEST, Partial
from sherd.mapreduce.reductions import Reduction
from sherd.mapreduce.tree import Forest, Node

ReductionOf = Callable[[Key], Reduction]


class Entry(NamedTuple):
    """What some neighbouring chunks have for a key. It is sent as a plain tuple."""

    first: tuple[int, int]
    """the first item that has this key, and the how many-th of its pairs"""
    values: int
    """how many there are"""
    partial: Any


def add_value(entries: Partial, key: Key, first: tuple[int, int], value: Any, reduction: Reduction) -> None:
    """Add the value of one item. Values must be added in the order of the items."""
    started = reduction.start(value)
    found = entries.get(key)
    if found is None:
        entries[key] = Entry(first, 1, started)
    else:
        entries[key] = Entry(found.first, found.values + 1, reduction.merge(found.partial, started))


def merging(reduction_of: ReductionOf) -> Callable[[Partial, Partial], Partial]:
    """How the results of two neighbours are merged, key by key."""

    def merge(left: Partial, right: Partial) -> Partial:
        for key, more in right.items():
            entry = left.get(key)
            if entry is None:
                left[key] = more
            else:
                partial = reduction_of(key).merge(entry.partial, more.partial)
                left[key] = Entry(entry.first, entry.values + more.values, partial)
        return left

    return merge


def reduced(comm: Communicator, what: str, forest: Forest[Partial], reduction_of: ReductionOf) -> dict[Key, Any]:
    """The result of every key, in the order in which keys first appear. Collective; the same on every rank."""
    parcels: list[dict[Node, dict[Key, tuple[Any, ...]]]] = [{} for _ in range(comm.world)]
    for node, entries in forest.nodes.items():
        for key, entry in entries.items():
            parcels[owner(key, comm.world)].setdefault(node, {})[key] = tuple(entry)
    forest.nodes.clear()  # the parcels have them
    with comm.counters.agreeing():
        received = exchange_objects(comm, parcels)
        problem, mine = "", []
        try:
            mine = _finished(received, reduction_of)
        except Exception as error:  # of the user's function, on this rank alone
            problem = "".join(traceback.format_exception(error))[-LONGEST:]
        told = comm.all_gather_object((problem, len(mine)), what=what)
        for rank, (text, _) in enumerate(told):
            if text:
                raise ChunkFailed(f"rank {comm.rank}: {what}: results could not be merged on rank {rank}:\n{text}")
        having = [rank for rank, (_, count) in enumerate(told) if count]
        # The result of a single key may be large: the others must not send as many zeros.
        everybody = [comm.broadcast_object(mine, having[0])] if len(having) == 1 else comm.all_gather_object(mine)
    ordered = sorted((each for results in everybody for each in results), key=lambda each: each[0])
    return {key: result for _, key, result in ordered}


def _finished(received: list[Any], reduction_of: ReductionOf) -> list[tuple[Any, Key, Any]]:
    """What this rank's keys come to: where each first appears, the key and its result."""
    forest: Forest[Partial] = Forest(merging(reduction_of))
    for parcel in received:
        while parcel:  # drop each as soon as it is merged
            node, entries = parcel.popitem()
            forest.add(node, {key: Entry(*entry) for key, entry in entries.items()})
    total = forest.total() or {}
    return [(entry.first, key, reduction_of(key).finish(entry.partial, entry.values)) for key, entry in total.items()]
