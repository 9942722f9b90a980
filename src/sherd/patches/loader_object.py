"""The user's loader object, with methods of ours. What loads, collates, pins and prefetches stays torch's own: it reads
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
    """Who leads one loader."""

    scheme: Any
    """how it is sharded: has `indices`, `length` and `seed`"""

    def wrap(self, iterator: _BaseDataLoaderIter, loader: Any) -> Any:
        """What the loader has in the place of an iterator of torch's."""

    def lend(self, wrapped: Any) -> Any:
        """What a loop gets of a wrapped iterator that the loader keeps for the next one."""


class Counted(DataLoader[Any]):
    """The methods that a loader has instead of its own where its batches are to be counted."""

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
    """The same where they are to be sharded too."""

    def _get_iterator(self) -> Any:
        vars(self)[_SEEDING] = True
        try:
            return super()._get_iterator()
        finally:
            del vars(self)[_SEEDING]

    @property
    def generator(self) -> Any:
        """The user's. An iterator that is being made gets another one, as it draws the seed of its workers from it."""
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
    """Have `loader` led by `guide`; if it is not `sharded`, its workers keep their seeds, and it its length."""
    vars(loader)[_GUIDE] = guide
    loader._iterator = None  # persistent workers of a plain epoch read the plain order
    swap_class(loader, Sharded if sharded else Counted)


def uninstall() -> None:
    """Forget the classes that were made. Objects that have one keep it."""
    subclass.cache_clear()


def guide_of(loader: Any) -> Any:
    """Who leads it, or None."""
    return getattr(loader, "__dict__", {}).get(_GUIDE)


def _plain(kind: Any, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)
