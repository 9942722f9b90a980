"""The user's loader object, led along a way of sharding.

Its class is exchanged for a subclass of its own class with the same name, and so is that of each iterator it makes.
What loads, collates, pins and prefetches stays torch's own: it reads other indices, and a batch comes with its share
and its number of samples.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from sherd.data import share
from sherd.data.way import Turn, Way
from sherd.observe import monitor

_TRAINS = "_sherd_trains"
_WAY = "_sherd_way"
_SEEDING = "_sherd_seeding"
_TURN = "_sherd_turn"
_PASS = "_sherd_pass"  # a weak reference
_HELD = "_sherd_held"  # the same pass, unless a loop holds it


class Counted(DataLoader[Any]):
    """The methods that a loader has instead of its own where its batches are to be counted."""

    @property
    def _index_sampler(self) -> Any:
        return way_of(self).indices(super()._index_sampler, self.num_workers * (self.prefetch_factor or 0))

    def __iter__(self) -> Any:
        iterator: Any = super().__iter__()
        persists = iterator is self._iterator
        return Lent(iterator) if persists else iterator

    def _get_iterator(self) -> _BaseDataLoaderIter:
        iterator = super()._get_iterator()
        kind: Any = type(iterator)
        iterator.__class__ = _subclass(CountedIterator, kind)
        _begin(iterator, self)
        return iterator

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a plain loader of the user's class."""
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        _, (_, *arguments), state, *rest = reduced
        if isinstance(state, dict):
            ours = (_WAY, _TRAINS)
            state = {name: value for name, value in state.items() if name not in ours} | {"_iterator": None}
        return _plain, (type(self).__bases__[1], *arguments), state, *rest


class Sharded(Counted):
    """The same where they are to be sharded too."""

    def _get_iterator(self) -> _BaseDataLoaderIter:
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
        return torch.Generator().manual_seed(way_of(self).seed(drawn))

    @generator.setter
    def generator(self, generator: Any) -> None:
        vars(self)["generator"] = generator

    def __len__(self) -> int:
        return way_of(self).length(super().__len__())


class CountedIterator(_BaseDataLoaderIter):
    """The methods that such a loader's iterator has instead of its own."""

    def __next__(self) -> Any:
        run, counted = monitor.current, None
        if run is None:
            return self._take()[0]
        trains = vars(self)[_TRAINS]
        run.begin_batch(trains)
        try:
            batch, counted = self._take()
        finally:
            run.end_batch(trains, counted)
        return batch

    def _take(self) -> tuple[Any, int]:
        """The next batch, and how many of its samples count: none if they are only repeated."""
        turn: Turn = vars(self)[_TURN]
        held: share.Pass | None = vars(self)[_PASS]()
        try:
            batch, counts, samples = turn.take(super().__next__)
        except BaseException:
            if held is not None:
                held.ends()
            raise
        if held is not None:
            held.yields(counts, samples)
        return batch, samples if counts else 0

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Persistent workers begin another epoch."""
        before: share.Pass | None = vars(self)[_PASS]()
        if before is not None:
            before.ends()
        super()._reset(loader, first_iter)
        _begin(self, loader)


class Lent:
    """An iterator with persistent workers, as a loop gets it. The loader keeps the iterator itself, so only this one
    tells when the loop was left."""

    def __init__(self, iterator: _BaseDataLoaderIter) -> None:
        self._iterator = iterator
        self._held = vars(iterator).pop(_HELD, None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def adopt(loader: DataLoader[Any], way: Way, trains: bool, alone: bool) -> None:
    """Lead `loader` along `way`; `trains` says whether its batches are those of the steps.

    `alone`, in a world of one, nothing is sharded, and workers keep their seeds.
    """
    vars(loader)[_WAY] = way
    vars(loader)[_TRAINS] = trains
    loader._iterator = None  # persistent workers of a plain epoch read the plain order
    kind: Any = type(loader)
    loader.__class__ = _subclass(Counted if alone else Sharded, kind)


def way_of(loader: Any) -> Way:
    """How a loader is led."""
    way: Way = vars(loader)[_WAY]
    return way


def is_counted(loader: Any) -> bool:
    """Whether it was distributed."""
    return isinstance(loader, Counted)


def trains(loader: Any) -> bool:
    """Whether it is a loader whose batches are those of the steps."""
    return bool(getattr(loader, "__dict__", {}).get(_TRAINS))


def _begin(iterator: _BaseDataLoaderIter, loader: Any) -> None:
    vars(iterator)[_TURN] = way_of(loader).turn(iterator._sampler_iter)
    vars(iterator)[_TRAINS] = vars(loader)[_TRAINS]
    vars(iterator)[_HELD] = held = share.Pass(loader)
    vars(iterator)[_PASS] = weakref.ref(held)


def _plain(kind: Any, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)


@functools.cache
def _subclass(methods: Any, kind: Any) -> Any:
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (methods, kind), own)
