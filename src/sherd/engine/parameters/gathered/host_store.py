"""Sharded parameters that the ranks of a host gather on use together: once, into memory that they share.

That memory consists of *slots*. A bucket is gathered into a free slot, and is mapped at its own address on each rank
while that rank uses it. A rank that has released it may reuse the slot while another rank still reads it: nothing is
written before all ranks of the host have started gathering the next bucket, and so have released the previous one. The
slot's number is compared between ranks like the rest of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sherd.comm import Handle
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.parameters.gathered.pages import AliasPages, Pages
from sherd.engine.parameters.gathered.store import GatheredStore, values_of


@dataclass
class _Slot:
    """Memory for one bucket at a time."""

    number: int
    memory: Tensor


class HostGatheredStore(GatheredStore):
    """Every rank has its rows; a bucket is whole on a host while its ranks use it."""

    def _make_room(self, buckets: Sequence[Bucket]) -> None:
        self._slots: list[_Slot] = []
        self._taken: dict[Bucket, _Slot] = {}
        super()._make_room(buckets)

    def _make_pages(self, bucket: Bucket) -> Pages:
        return AliasPages(bucket.described.numel, bucket.dtype)

    def _fetch(self, bucket: Bucket) -> Handle:
        values = values_of(bucket)
        assert isinstance(values.pages, AliasPages), "made above"
        memory = self._take_slot(bucket, values.pages.nbytes).memory
        backing = self._mesh.shard.backing(memory)
        assert backing is not None, "slots are in shared memory"
        whole = memory.view(bucket.dtype)[: bucket.described.numel]
        values.pages.show(backing, whole)
        return self._gather(bucket, whole)

    def _release(self, bucket: Bucket) -> None:
        super()._release(bucket)
        del self._taken[bucket]

    def _take_slot(self, bucket: Bucket, nbytes: int) -> _Slot:
        """The smallest free slot that is large enough, or a new one. Ranks that did the same take the same."""
        taken = {slot.number for slot in self._taken.values()}
        # Not one of twice the size: a large bucket would then need another.
        fits = [slot for slot in self._slots if slot.number not in taken and nbytes <= slot.memory.nbytes < 2 * nbytes]
        if not fits:
            fits = [_Slot(len(self._slots), self._mesh.shard.shared_tensor(nbytes, dtype=torch.uint8))]
            self._slots += fits
        slot = self._taken[bucket] = min(fits, key=lambda each: (each.memory.nbytes, each.number))
        return slot

    def gathered_bytes(self) -> int:
        return sum(slot.memory.nbytes for slot in self._slots) if self._mesh.shard.host.rank == 0 else 0
