"""The user's loader object, led along a way of sharding.

Its class is exchanged for a subclass of its own class with the same name, and so is that of each iterator it makes.
What loads, collates, pins and prefetches stays torch's own: it reads other indices, and a batch comes with its share.

In a world of one there is no way to be led along, and the loader is left alone; while events are on, its waits are
timed and its samples counted, by a subclass that does nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from sherd.data import share
from sherd.data.iterable import rows
from sherd.data.way import Turn, Way
from sherd.observe import monitor

_TRAINS = "_sherd_trains"
_WAY = "_sherd_way"
_SEEDING = "_sherd_seeding"
_TURN = "_sherd_turn"


class Led(DataLoader[Any]):
    """What every loader of ours has instead of its own."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a plain loader of the user's class."""
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        _, (_, *arguments), state, *rest = reduced
        if isinstance(state, dict):
            ours = (_WAY, _TRAINS)
            state = {name: value for name, value in state.items() if name not in ours} | {"_iterator": None}
        return _plain, (type(self).__bases__[1], *arguments), state, *rest


class Sharded(Led):
    """The methods that a sharded loader has instead of its own."""

    @property
    def _index_sampler(self) -> Any:
        indices = way_of(self).indices(self.num_workers * (self.prefetch_factor or 0))
        return super()._index_sampler if indices is None else indices

    def _get_iterator(self) -> _BaseDataLoaderIter:
        vars(self)[_SEEDING] = True
        try:
            iterator = super()._get_iterator()
        finally:
            del vars(self)[_SEEDING]
        kind: Any = type(iterator)
        iterator.__class__ = _subclass(ShardedIterator, kind)
        _begin(iterator, self)
        return iterator

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


class ShardedIterator(_BaseDataLoaderIter):
    """The methods that a sharded loader's iterator has instead of its own."""

    def __next__(self) -> Any:
        return _timed(self, self._take)

    def _take(self) -> tuple[Any, float]:
        turn: Turn = vars(self)[_TURN]
        try:
            batch, counts = turn.take(super().__next__)
        except BaseException:
            share.done(self)
            raise
        share.use(counts, by=self)
        return batch, counts

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Persistent workers begin another epoch."""
        share.done(self)
        super()._reset(loader, first_iter)
        _begin(self, loader)


class Timed(Led):
    """A loader that only says what it does."""

    def _get_iterator(self) -> _BaseDataLoaderIter:
        iterator = super()._get_iterator()
        kind: Any = type(iterator)
        iterator.__class__ = _subclass(TimedIterator, kind)
        vars(iterator)[_TRAINS] = vars(self)[_TRAINS]
        return iterator


class TimedIterator(_BaseDataLoaderIter):
    """Its iterator."""

    def __next__(self) -> Any:
        return _timed(self, self._take)

    def _take(self) -> tuple[Any, float]:
        return super().__next__(), 1.0


def adopt(loader: DataLoader[Any], way: Way, trains: bool) -> None:
    """Shard `loader`; `trains` says whether its batches are those of the steps."""
    vars(loader)[_WAY] = way
    _exchange(loader, Sharded, trains)


def time(loader: DataLoader[Any], trains: bool) -> None:
    """Have a loader that is left as it is tell what it does."""
    _exchange(loader, Timed, trains)


def _exchange(loader: DataLoader[Any], methods: Any, trains: bool) -> None:
    vars(loader)[_TRAINS] = trains
    loader._iterator = None  # persistent workers of a plain epoch read the plain order
    kind: Any = type(loader)
    loader.__class__ = _subclass(methods, kind)


def way_of(loader: Any) -> Way:
    """How a sharded loader is."""
    way: Way = vars(loader)[_WAY]
    return way


def _begin(iterator: _BaseDataLoaderIter, loader: Any) -> None:
    vars(iterator)[_TURN] = way_of(loader).turn(iterator._sampler_iter)
    vars(iterator)[_TRAINS] = vars(loader)[_TRAINS]


def _timed(iterator: Any, take: Callable[[], tuple[Any, float]]) -> Any:
    """What `take` gives, which is a batch and its share; whoever records the run hears of it."""
    run = monitor.current
    if run is None:
        return take()[0]
    trains, samples = vars(iterator)[_TRAINS], None
    run.begin_batch(trains)
    try:
        batch, counts = take()
        samples = rows(batch) if counts else 0  # or it is repeated for nothing
    finally:
        run.end_batch(trains, samples)
    return batch


def _plain(kind: Any, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)


@functools.cache
def _subclass(methods: Any, kind: Any) -> Any:
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (methods, kind), own)
