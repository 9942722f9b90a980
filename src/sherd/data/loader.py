"""A loader that follows a sharding scheme: each batch comes with its weight and its number of samples."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from sherd.data import batch_weight
from sherd.data.scheme import ShardingScheme
from sherd.observe import monitor
from sherd.patches import loader_object


def attach(loader: DataLoader[Any], scheme: ShardingScheme, trains: bool, alone: bool) -> None:
    """Make `loader` follow `scheme`. `trains`: its batches are the ones that steps train on.

    `alone`: a world of one, where nothing is sharded and workers keep their seeds.
    """
    loader_object.install(loader, Guide(scheme, trains), sharded=not alone)


def is_counted(loader: Any) -> bool:
    """Whether it was distributed."""
    return loader_object.guide_of(loader) is not None


def trains(loader: Any) -> bool:
    """Whether its batches are the ones that steps train on."""
    guide: Guide | None = loader_object.guide_of(loader)
    return guide is not None and guide.trains


class Guide:
    """What sherd adds to one loader."""

    def __init__(self, scheme: ShardingScheme, trains: bool) -> None:
        self.scheme = scheme
        self.trains = trains

    def wrap(self, iterator: Any, loader: Any) -> CountedIterator:
        return CountedIterator(iterator, loader, self)

    def lend(self, wrapped: CountedIterator) -> LoopIterator:
        return LoopIterator(wrapped)


class _Forwarding:
    """Passes everything on to another iterator."""

    def __init__(self, iterator: Any) -> None:
        self._inner = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # a copy has no attributes yet
            raise AttributeError(name)
        return getattr(self._inner, name)


class CountedIterator(_Forwarding):
    """One of torch's iterators, with its batches counted."""

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
        """The next batch, and how many of its samples count: 0 if they are all repeats."""
        held = self._pass()
        try:
            batch, weight, samples = self._take_next(self._inner.__next__)
        except BaseException:
            if held is not None:
                held.ends()
            raise
        if held is not None:
            held.yields(weight, samples)
        return batch, samples if weight else 0

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin another epoch with persistent workers."""
        before = self._pass()
        if before is not None:
            before.ends()
        self._inner._reset(loader, first_iter)
        self._begin(loader)

    def _begin(self, loader: Any) -> None:
        self._take_next = self._guide.scheme.epoch(self._inner._sampler_iter)
        self.held: batch_weight.Pass | None = batch_weight.Pass(loader)  # unless a loop holds it
        self._pass = weakref.ref(self.held)


class LoopIterator(_Forwarding):
    """What a loop gets of an iterator with persistent workers. The loader keeps the iterator itself, so only the end of
    this object shows that the loop was left."""

    def __init__(self, iterator: CountedIterator) -> None:
        super().__init__(iterator)
        self._held, iterator.held = iterator.held, None

    def __next__(self) -> Any:
        return next(self._inner)
