"""Which parameters share a bucket, and which owner has which whole layer: the choices that the layout builds on.

They are recorded in a layout's description, so a later version may choose differently and still read old checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sherd.layout.entry import ITEMSIZE, Dtypes, Entry
from sherd.layout.placement import Placement, padded

LARGEST_BUCKET_BYTES = 2 << 20
"""The fastest of 0.5 to 8 MB: smaller ones need more calls, larger ones leave the cache before they are reduced."""
SMALLEST_BUCKET_BYTES = 512 << 10
"""A call costs as much as a few hundred KB: what is smaller is reduced at once when backward ends."""
BUCKETS = 8
"""How many buckets a model is cut into, within these bounds: the first can be reduced long before backward ends, and a
model of many small tensors is not slowed down by calls. The ring's four slots on a rank then take at most half a
model's gradient, or 2 MB: little beside a process. From 16 MB on they are 8 MB, whatever the model. (Those of a small
model on one host, below, take as much as its gradient.)"""
SMALL_MODEL_BYTES = 16 << 20
"""Up to here ranks of one host exchange gradients when a backward has ended: a hook costs some 7 us. On two ranks a
GPT of 1.6 MB in 40 tensors is 10% faster, one of 4.8 MB 6% in 292 tensors and 1% in 76, one of 15 MB 4%."""
SMALL_MODEL_BUCKET_BYTES = 4 << 20
"""Of these models. Nothing waits for the first bucket, so there are as few as the cache likes: a step of 15 MB took
57 ms with 4 MB, 58 with 2 MB and 57.4 in one bucket."""
ACROSS_HOSTS = 2.25
"""How much larger buckets are that cross a network, where a call costs more. On two hosts of two ranks with 1 Gbit/s
between them, a step of 2.35 s took 2.15 s with buckets of 4 MB. The extra eighth is for the biases and norms around a
matrix of that size, which would otherwise need their own buckets: 52 of them instead of 32 for a GPT of 33.7 M."""


@dataclass(frozen=True)
class Packed:
    """The contents of one bucket: indices of its entries, the owner of all of them if they are whole layers, and the
    ranks that have them if not all do."""

    members: tuple[int, ...]
    holder: int | None = None
    ranks: tuple[int, ...] | None = None


@dataclass
class _Open:
    """A bucket that still takes entries."""

    members: list[int] = field(default_factory=list)
    filled: int = 0

    def add(self, index: int, size: int) -> None:
        self.members.append(index)
        self.filled += size


def pack(entries: Sequence[Entry], keys: Sequence[object], bucket_numel: int) -> list[tuple[int, ...]]:
    """Indices of the entries of each bucket, in the given order, at most `bucket_numel` elements to a bucket.

    One bucket of the same dtypes, placement and key is open at a time. It closes before the entry that would overfill
    it, and an entry larger than `bucket_numel` has a bucket of its own. Buckets are ordered by their last entry: the
    order in which they are completed when parameters arrive in the given order.
    """
    buckets: list[_Open] = []
    opened: dict[tuple[Dtypes, Placement, object], _Open] = {}
    for index, (entry, key) in enumerate(zip(entries, keys, strict=True)):
        kind, size = (entry.roles, entry.placement, key), padded(entry.numel)
        bucket = opened.get(kind)
        if bucket is None or bucket.filled + size > bucket_numel:
            bucket = opened[kind] = _Open()
            buckets.append(bucket)
        bucket.add(index, size)
    return sorted((tuple(bucket.members) for bucket in buckets), key=lambda members: members[-1])


def bucket_numel(entries: Sequence[Entry], bucket_bytes: int | None, crosses: bool) -> int:
    """Elements of a bucket: as requested, or a share of the model, so that a small model is reduced in parts too."""
    times = ACROSS_HOSTS if crosses else 1.0
    largest = max((ITEMSIZE[entry.dtype] for entry in entries), default=4)
    if bucket_bytes is None:
        share = max(int(times * total_bytes(entries) / BUCKETS), SMALLEST_BUCKET_BYTES)
        bucket_bytes = min(share, int(times * LARGEST_BUCKET_BYTES))
    return max(bucket_bytes // largest, 1)


def total_bytes(entries: Iterable[Entry]) -> int:
    """Bytes of these in buckets."""
    return sum(padded(entry.numel) * ITEMSIZE[entry.dtype] for entry in entries)


class Holders:
    """Chooses the owners of whole layers: the largest first, each to the owner that has least with it.

    Both bytes and work are balanced. What an owner has is the greater of its shares of the two.
    """

    def __init__(self, world: int) -> None:
        self._bytes = [0] * world
        self._work = [0] * world

    def choose(
        self,
        entries: Sequence[Entry],
        work: Sequence[int] | None = None,
        ranks: Sequence[tuple[int, ...] | None] | None = None,
    ) -> list[int | None]:
        """The rank that owns each of these entries, None where it is not a whole layer; one of its `ranks`, if given.

        `work` is what a step of each costs, in any unit. Without it, work goes by elements.
        """
        sizes = [padded(entry.numel) * ITEMSIZE[entry.dtype] for entry in entries]
        work = [padded(entry.numel) for entry in entries] if work is None else work
        whole = [index for index, entry in enumerate(entries) if entry.placement is Placement.LAYER]
        every = range(len(self._bytes))
        # Both in shares of all there is. The two products are those shares times the same number, without rounding.
        all_bytes = max(sum(self._bytes) + sum(sizes[index] for index in whole), 1)
        all_work = max(sum(self._work) + sum(work[index] for index in whole), 1)
        chosen: list[int | None] = [None] * len(entries)

        def load(nbytes: int, of_work: int) -> tuple[int, int]:
            shares = nbytes * all_work, of_work * all_bytes
            return max(shares), min(shares)

        for index in sorted(whole, key=lambda index: (load(sizes[index], work[index]), -index), reverse=True):
            size, its_work = sizes[index], work[index]
            among = every if ranks is None else ranks[index] or every
            loads = ((load(self._bytes[rank] + size, self._work[rank] + its_work), rank) for rank in among)
            owner = min(loads)[1]
            self._bytes[owner] += size
            self._work[owner] += its_work
            chosen[index] = owner
        return chosen
