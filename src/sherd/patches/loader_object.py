"""Gives the user's loader object our methods. Loading, collating, pinning and prefetching stay torch's own: it reads
other indices, and its iterators are wrapped."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from sherd.patches.replacing import subclass, swap_class

RELIES_ON = {
    "torch.utils.data:DataLoader.__iter__": "self",  # keeps a persistent iterator as `_iterator`
    "torch.utils.data:DataLoader._get_iterator": "self",
    "torch.utils.data:DataLoader._index_sampler": None,
    "torch.utils.data:DataLoader.__len__": "self",
    "torch.utils.data.dataloader:_BaseDataLoaderIter.__init__": "self loader",  # draws from `loader.generator`
    "torch.utils.data.dataloader:_BaseDataLoaderIter._reset": "self loader first_iter",  # sets `_sampler_iter`
}
_GUIDE = "_sherd_guide"
_SEEDING = "_sherd_seeding"


class Guide(Protocol):
    """Decides what one loader reads."""

    scheme: Any
    """how it is sharded: has `indices`, `length` and `seed`"""

    def wrap(self, iterator: _BaseDataLoaderIter, loader: Any) -> Any:
        """The object that the loader uses in place of torch's iterator."""

    def lend(self, wrapped: Any) -> Any:
        """The object that a loop gets for a wrapped iterator that the loader keeps for the next loop."""


class Counted(DataLoader[Any]):
    """The methods of a loader whose batches are counted."""

    @property
    def _index_sampler(self) -> Any:
        return guide_of(self).scheme.indices(super()._index_sampler, self.num_workers * (self.prefetch_factor or 0))

    def __iter__(self) -> Any:
        iterator: Any = super().__iter__()
        persists = iterator is self._iterator
        return guide_of(self).lend(iterator) if persists else iterator

    def _get_iterator(self) -> Any:
        return guide_of(self).wrap(super()._get_iterator(), self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a plain loader of the user's class."""
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        _, (_, *arguments), state, *rest = reduced
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != _GUIDE} | {"_iterator": None}
        return _plain, (type(self).__bases__[1], *arguments), state, *rest


class Sharded(Counted):
    """The methods of a loader whose batches are sharded too."""

    def _get_iterator(self) -> Any:
        vars(self)[_SEEDING] = True
        try:
            return super()._get_iterator()
        finally:
            del vars(self)[_SEEDING]

    @property
    def generator(self) -> Any:
        """The user's. An iterator under construction gets another one, from which it draws the seed of its workers."""
        own = vars(self)["generator"]
        if _SEEDING not in vars(self):
            return own
        drawn = int(torch.empty((), dtype=torch.int64).random_(generator=own))
        return torch.Generator().manual_seed(guide_of(self).scheme.seed(drawn))

    @generator.setter
    def generator(self, generator: Any) -> None:
        vars(self)["generator"] = generator

    def __len__(self) -> int:
        length: int = guide_of(self).scheme.length(super().__len__())
        return length


def install(loader: DataLoader[Any], guide: Guide, sharded: bool) -> None:
    """Put `loader` under `guide`; if it is not `sharded`, it keeps its length and its workers their seeds."""
    vars(loader)[_GUIDE] = guide
    loader._iterator = None  # persistent workers of a plain epoch read the plain order
    swap_class(loader, Sharded if sharded else Counted)


uninstall = subclass.cache_clear
"""Forgets the classes that were made. Existing objects keep theirs."""


def guide_of(loader: Any) -> Any:
    """The guide of `loader`, or None."""
    return getattr(loader, "__dict__", {}).get(_GUIDE)


def _plain(kind: Any, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)
