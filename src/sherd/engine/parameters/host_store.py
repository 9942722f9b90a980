"""Parameters of which a host has one copy, that all its ranks map.

Each rank maps it twice. Its slices, which it updates in place, lie in a mapping that all ranks share. Its
`parameter.data` lies in a private one (see `copy_on_write`): there it reads everybody's updates, and what it writes by
whatever route stays its own. Before the next update the ranks compare what they wrote, and if that is the same
everywhere, it is stored once.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from sherd.comm.host.memory import PAGE
from sherd.engine.parameters import page_map
from sherd.engine.parameters.copy_on_write import CopyOnWrite
from sherd.engine.parameters.memory import carve
from sherd.engine.parameters.stores import FlatStore, by_index
from sherd.layout.entry import dtype_name
from sherd.layout.shard_layout import ShardLayout

log = logging.getLogger("sherd")


class HostStore(FlatStore):
    """One copy on each host: an update needs messages between hosts only."""

    @property
    def compares_edits(self) -> bool:  # type: ignore[override]
        return bool(self._own_views)

    @property
    def sees_all_edits(self) -> bool:  # type: ignore[override]
        return page_map.can_tell() if self._own_views else self._comm.world == 1

    def acquire(self) -> None:
        return  # comparing edits has waited for everybody, and alone there is nobody to wait for

    def publish(self) -> None:
        if self._alone:
            self._comm.barrier().wait()
        else:
            for handle in [self._comm.publish(s, b) for s, b in zip(self.slices, self.buckets, strict=True)]:
                handle.wait()
        self.bump()

    # ---------------------------------------------------------------- edits

    def edited(self, suspects: Iterable[int]) -> set[int]:
        if not self._own_views:
            return super().edited(suspects)
        suspects = set(suspects)
        moved = set(self._moved(suspects))
        found = {index for index in moved if not self._is_common(index)}
        self.take_back(moved - found)
        return found.union(self._written(suspects - found))

    def keep_edits(self, indices: Sequence[int]) -> None:
        self._store_once(indices)
        self.take_back(indices)
        self._written(indices)  # which gives back the pages that are common again
        self._comm.host.barrier().wait()  # an update may follow at once, and would make pages differ that do not

    def write(self, indices: Sequence[int]) -> None:
        if not self._alone:
            self.from_leader(self._parameters[index] for index in indices)
        self._comm.host.barrier().wait()
        self._store_once(indices)
        self.take_back(indices)
        # What this rank wrote into them before counts no more.
        for index in self._written(indices).intersection(indices):
            self.homes[index].copy_(self.originals[index])
        self._written(indices)

    def _store_once(self, indices: Sequence[int]) -> None:
        """The first rank of the host has the values that all shall have."""
        if self._comm.host.rank == 0:
            moved = self._values_of_moved(indices)
            for index in indices:
                self.originals[index].copy_(moved.get(index, self._parameters[index].detach()))
        self._comm.host.barrier().wait()

    def _written(self, suspects: Iterable[int]) -> set[int]:
        """The parameters that differ from the common copy in what this rank has written. Gives back all other pages.

        Where the page map cannot tell, only pages of `suspects` are looked at.
        """
        found: set[int] = set()
        for dtype, view in self._own_views.items():
            if page_map.can_tell():
                pages = view.written()
            else:
                pages = [
                    view.pages_of(self.homes[index]) for index in suspects if dtype_name(self.homes[index]) == dtype
                ]
            for start, stop in view.give_back(pages):
                among = self._places[dtype].within(start * PAGE, stop * PAGE)
                different = {index for index in among if index in found or not self._is_common(index)}
                found |= different
                if not different:
                    view.drop(start, stop)  # they differ in padding alone, and would hide updates
        return found

    def _is_common(self, index: int) -> bool:
        entry = self._trained.inventory.entry(index)
        own, common = self._flattened(index), entry.flattened(self.originals[index])
        return torch.equal(own.view(torch.uint8), common.view(torch.uint8))  # bits: NaN is NaN, and 0.0 is not -0.0

    # ---------------------------------------------------------------- memory

    def bytes(self) -> int:
        return super().bytes() if self._comm.host.rank == 0 else 0

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._comm.shared_tensor(numel, dtype=dtype)

    def _seen(self, layout: ShardLayout, order: Sequence[int]) -> list[Tensor]:
        backings = {dtype: self._comm.backing(flat) for dtype, flat in self._flats.items()}
        self._own_views = {d: CopyOnWrite(self._flats[d], backing) for d, backing in backings.items() if backing}
        if not self._own_views:
            return self.originals  # alone on this host
        if not page_map.can_tell() and self._comm.rank == 0:
            _say_unseen()
        memory = {dtype: view.memory for dtype, view in self._own_views.items()}
        homes = by_index(layout, order, carve(memory, layout.buckets, lambda bucket: bucket.numel))
        self._places = {dtype: _Places(flat, homes) for dtype, flat in memory.items()}
        return homes

    def _fill(self) -> None:
        if not self._alone:
            self.from_leader(self._parameters)
        if self._comm.host.rank == 0:
            self._copy_in()
        self._comm.host.barrier().wait()

    @property
    def _alone(self) -> bool:
        """Whether there is only this host."""
        return self._comm.host.world == self._comm.world


class _Places:
    """Where parameters lie in a flat tensor of their dtype."""

    def __init__(self, flat: Tensor, homes: Sequence[Tensor]) -> None:
        found = [(home.data_ptr() - flat.data_ptr(), index) for index, home in enumerate(homes)]
        found = sorted((offset, i) for offset, i in found if homes[i].dtype == flat.dtype and homes[i].numel())
        self._begins = [offset for offset, _ in found]
        self._indices = [index for _, index in found]

    def within(self, start: int, stop: int) -> list[int]:
        """The parameters that may have some of the bytes `[start, stop)`: all that have, and one more at the most."""
        first = max(bisect_right(self._begins, start) - 1, 0)
        return self._indices[first : bisect_left(self._begins, stop)]


@cache
def _say_unseen() -> None:
    log.warning(
        "the page map of this process (/proc/self/pagemap) cannot be read, so edits of parameters through .data or "
        'numpy go unseen; sherd.distribute(..., check="edits") finds them, at the cost of reading all parameters twice '
        "per step"
    )
