"""Parameters of which a host keeps its share, gathered on use by its ranks together: once, into memory that they share.

That memory consists of *slots*. A bucket is gathered into a slot that is free, and appears at its own address on each
rank for as long as that rank uses it. A rank that has released it may be ahead of another that still reads it; it can
take the slot for another bucket all the same, since nothing is written before all ranks of the host have begun to
gather that: by then they have all released what was there before. Which slot it is, is compared as all of the call is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sherd.comm import Handle
from sherd.engine.parameters.gathered.pages import AliasPages, Pages
from sherd.engine.parameters.gathered.store import GatheredStore
from sherd.layout.entry import dtype_of
from sherd.layout.slicing import Bucket


class HostGatheredStore(GatheredStore):
    """Every rank has its rows; a bucket is whole on a host while its ranks use it."""

    def _make_room(self) -> list[Tensor]:
        self._slots: list[Tensor] = []
        self._free: set[int] = set()
        self._slot_of: dict[int, int] = {}
        return super()._make_room()

    def _make_pages(self, buckets: Sequence[Bucket]) -> Sequence[Pages]:
        self._aliases = [AliasPages(bucket.numel, dtype_of(bucket.dtype)) for bucket in buckets]
        return self._aliases

    def _fetch(self, bucket: int) -> Handle:
        slot = self._slot_of[bucket] = self._take_slot(bucket)
        described, memory = self._layout.buckets[bucket], self._slots[slot]
        backing = self._mesh.shard.backing(memory)
        assert backing is not None, "the ranks of a host have made it together"
        whole = memory.view(dtype_of(described.dtype))[: described.numel]
        self._aliases[bucket].show(backing, whole)
        return self._mesh.gather(self._rows[bucket], whole, self._names[bucket])

    def _release(self, bucket: int) -> None:
        super()._release(bucket)
        self._free.add(self._slot_of.pop(bucket))

    def _take_slot(self, bucket: int) -> int:
        """The smallest slot that is free and large enough, or a new one. Ranks that did the same take the same."""
        nbytes = self._aliases[bucket].nbytes
        # Not one of twice the size: a large bucket would need another one then.
        fits = [slot for slot in self._free if nbytes <= self._slots[slot].nbytes < 2 * nbytes]
        if not fits:
            self._slots.append(self._mesh.shard.shared_tensor(nbytes, dtype=torch.uint8))
            return len(self._slots) - 1
        slot = min(fits, key=lambda each: (self._slots[each].nbytes, each))
        self._free.discard(slot)
        return slot

    def gathered_bytes(self) -> int:
        return sum(slot.nbytes for slot in self._slots) if self._mesh.shard.host.rank == 0 else 0
