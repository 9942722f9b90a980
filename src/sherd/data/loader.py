"""A loader that is led along a way of sharding: a batch comes with its share and its number of samples."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from sherd.data import share
from sherd.data.way import Way
from sherd.observe import monitor
from sherd.patches import loader_object


def lead(loader: DataLoader[Any], way: Way, trains: bool, alone: bool) -> None:
    """Lead `loader` along `way`; `trains` says whether its batches are those of the steps.

    `alone`, in a world of one, nothing is sharded, and workers keep their seeds.
    """
    loader_object.install(loader, Guide(way, trains), sharded=not alone)


def is_counted(loader: Any) -> bool:
    """Whether it was distributed."""
    return loader_object.guide_of(loader) is not None


def trains(loader: Any) -> bool:
    """Whether it is a loader whose batches are those of the steps."""
    guide: Guide | None = loader_object.guide_of(loader)
    return guide is not None and guide.trains


class Guide:
    """Leads one loader."""

    def __init__(self, way: Way, trains: bool) -> None:
        self.way = way
        self.trains = trains

    def wrap(self, iterator: Any, loader: Any) -> CountedIterator:
        return CountedIterator(iterator, loader, self)

    def lend(self, wrapped: CountedIterator) -> Lent:
        return Lent(wrapped)


class _Forwarding:
    """Has whatever another iterator has."""

    def __init__(self, iterator: Any) -> None:
        self._inner = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # of a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self._inner, name)


class CountedIterator(_Forwarding):
    """An iterator of torch's whose batches are counted."""

    def __init__(self, iterator: Any, loader: Any, guide: Guide) -> None:
        super().__init__(iterator)
        self._guide = guide
        self._begin(loader)

    def __next__(self) -> Any:
        run, counted = monitor.current, None
        if run is None:
            return self._take()[0]
        run.begin_batch(self._guide.trains)
        try:
            batch, counted = self._take()
        finally:
            run.end_batch(self._guide.trains, counted)
        return batch

    def _take(self) -> tuple[Any, int]:
        """The next batch, and how many of its samples count: none if they are only repeated."""
        held = self._pass()
        try:
            batch, counts, samples = self._turn.take(self._inner.__next__)
        except BaseException:
            if held is not None:
                held.ends()
            raise
        if held is not None:
            held.yields(counts, samples)
        return batch, samples if counts else 0

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Persistent workers begin another epoch."""
        before = self._pass()
        if before is not None:
            before.ends()
        self._inner._reset(loader, first_iter)
        self._begin(loader)

    def _begin(self, loader: Any) -> None:
        self._turn = self._guide.way.turn(self._inner._sampler_iter)
        self.held: share.Pass | None = share.Pass(loader)  # unless a loop holds it
        self._pass = weakref.ref(self.held)


class Lent(_Forwarding):
    """An iterator with persistent workers, as a loop gets it. The loader keeps the iterator itself, so only this one
    tells when the loop was left."""

    def __init__(self, iterator: CountedIterator) -> None:
        super().__init__(iterator)
        self._held, iterator.held = iterator.held, None

    def __next__(self) -> Any:
        return next(self._inner)
