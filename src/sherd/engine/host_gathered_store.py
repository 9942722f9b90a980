"""Parameters of which a host keeps its share, gathered on use by its ranks together: once, into memory that they share.

What one rank releases another may still read. All of them have released it when they have all begun to gather
something else since; the first of them then lets the memory go. That they release the same is compared with each
gathering, as what they gather is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from sherd.comm import Handle, Together
from sherd.engine.entry import ITEMSIZE, dtype_of
from sherd.engine.gathered_store import GatheredStore
from sherd.engine.pages import Pages, SharedPages, in_pages
from sherd.engine.slicing import Bucket
from sherd.errors import SherdError


class HostGatheredStore(GatheredStore):
    """Every rank has its rows; a bucket is whole on a host while its ranks use it."""

    shared = True

    def _take_over(self) -> list[Tensor]:
        self._released: list[int] = []  # since something was gathered last
        self._fetches: Counter[int] = Counter()
        return super()._take_over()

    def _make_pages(self, buckets: Sequence[Bucket]) -> Sequence[Pages]:
        sizes = [bucket.numel * ITEMSIZE[bucket.dtype] for bucket in buckets]
        starts = in_pages(sizes)
        memory = self._mesh.shard.shared_tensor(starts[-1], dtype=torch.uint8)
        parts = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        return [SharedPages(p.view(dtype_of(b.dtype))) for p, b in zip(parts, buckets, strict=True)]

    def _fetch(self, bucket: int) -> Handle:
        released, self._released = self._released, []
        fetches = [self._fetches[each] for each in released]
        self._fetches[bucket] += 1
        self._pages[bucket].acquire()
        what = self._names[bucket] + (f" after the release of {released}" if released else "")
        handle = self._mesh.gather(self._rows[bucket], self._pages[bucket].memory, what)

        def let_go() -> None:
            for each, before in zip(released, fetches, strict=True):
                if self._fetches[each] == before:
                    self._pages[each].release()

        return Together([handle], self._pages[bucket].memory, let_go if self._first else lambda: None)

    def _release(self, bucket: int) -> None:
        self._released.append(bucket)

    def _write_back(self, bucket: int) -> None:
        raise SherdError(
            f"rank {self._comm.rank}: {self._names[bucket]} was edited outside full_parameters; it is shared by the "
            f"ranks of this host, so each rank's edit adds up; edit it inside `with sherd.full_parameters(model):`"
        )

    def gathered_bytes(self) -> int:
        return super().gathered_bytes() if self._first else 0

    @property
    def _first(self) -> bool:
        return self._mesh.shard.host.rank == 0
