"""What a loader yields in one process, batch by batch, whether it was sharded or not: for work that is dealt on demand.

A shuffled order would be another one on every rank, so samples come in the order of the dataset. Samples that
`drop_last=True` leaves out of training are read too: each counts once. Loading, collating, pinning and prefetching are
torch's own.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from sherd.data.iterable import Agreeing, rows
from sherd.data.sharding import subset_checksum
from sherd.errors import ConfigError
from sherd.patches import loader_object

Read = Iterator[tuple[range, Iterator[Any]]]
"""Ranges of items, and the items of each."""
Agreed = Callable[[Any], Any]
"""Returns rank 0's of a small object. Collective."""


class WholeLoader:
    """The batches of a loader over a map-style dataset, by number."""

    def __init__(self, loader: DataLoader[Any], indices: Sequence[Any], drawn: bool) -> None:
        self.count: int | None = len(indices)
        self.kind = f"{type(loader.dataset).__name__} of {len(loader.dataset)} samples"  # type: ignore[arg-type]
        self.checksum = subset_checksum(loader.dataset)
        self._loader = loader
        self._indices = indices
        self._drawn = drawn  # by a sampler, perhaps another one on each rank

    def agree(self, agreed: Agreed) -> None:
        """Take rank 0's order. Collective if a sampler decides it."""
        if self._drawn:
            self._indices = agreed(self._indices)

    def samples(self, number: int, batch: Any) -> int:
        """How many samples a batch has."""
        return len(self._indices[number]) if self._loader.batch_sampler is not None else rows(batch)

    def read(self, wanted: Iterator[range]) -> Read:
        """The batches of these ranges, loaded while they are asked for; workers load ahead."""
        return self._ahead(wanted) if self._loader.num_workers else self._one_by_one(wanted)

    def _one_by_one(self, wanted: Iterator[range]) -> Read:
        feed = _Feed()
        batches = iter(self._follows(feed))
        for part in wanted:
            feed.items.extend(self._indices[number] for number in part)
            yield part, (next(batches) for _ in part)
            feed.items.clear()  # of a part that failed

    def _ahead(self, wanted: Iterator[range]) -> Read:
        parts: deque[range] = deque()
        batches = iter(self._follows(_Drawn(wanted, parts, self._indices)))  # draws the first ones
        while parts:
            part, taken = parts.popleft(), 0

            def items(part: range = part) -> Iterator[Any]:
                nonlocal taken
                for _ in part:
                    taken += 1
                    yield next(batches)

            yield part, items()
            while taken < len(part):  # the rest of a part that failed
                taken += 1
                _skip(batches)

    def _follows(self, indices: Any) -> DataLoader[Any]:
        """A plain loader like the user's that reads these indices."""
        plain = copy.copy(self._loader)
        own = vars(plain)  # torch refuses assignments to these
        own["batch_sampler" if self._loader.batch_sampler is not None else "sampler"] = indices
        own["persistent_workers"], own["in_order"], own["_iterator"] = False, True, None
        own["generator"] = None  # or the seed that torch draws for workers would change the user's
        return plain


class Stream:
    """The batches of a loader that can only be read from its beginning, and so by every rank."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.count: int | None = None
        self.kind = f"a stream ({type(loader.dataset).__name__})"
        self.checksum = 0
        self._loader = loader

    def agree(self, agreed: Agreed) -> None:
        """There is only one order."""

    def samples(self, number: int, batch: Any) -> int:
        """How many samples a batch has."""
        return rows(batch)

    def read(self, wanted: Iterator[range]) -> Read:
        """The batches of these ranges, which must ascend. Afterwards `count` is known."""
        plain = copy.copy(self._loader)
        vars(plain).update(persistent_workers=False, _iterator=None)
        position, batches = 0, iter(plain)
        failed: list[Exception] = []  # one that raised has no more items, though that is not its end

        def taken(limit: int) -> Iterator[Any]:
            nonlocal position
            if failed:
                raise failed[0]
            try:
                for batch in itertools.islice(batches, limit):
                    position += 1
                    yield batch
            except Exception as error:
                failed.append(error)
                raise

        for part in wanted:
            try:
                deque(taken(part.start - position), maxlen=0)
                first = list(taken(1))
            except Exception:
                yield part, taken(1)  # raises it where failures of items are counted
                return
            if not first:
                break
            yield part, itertools.chain(first, taken(len(part) - 1))
            if failed:
                return
            deque(taken(part.stop - position), maxlen=0)  # the rest of a part that failed
        if self.count is None:
            deque(taken(sys.maxsize), maxlen=0)
            self.count = position


class _Feed:
    """Indices that are there when they are asked for; unlike a generator, it can go on after its end."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> Any:
        if not self.items:
            raise StopIteration
        return self.items.popleft()


class _Drawn:
    """The indices of the parts that are wanted, noted as torch draws them."""

    def __init__(self, wanted: Iterator[range], parts: deque[range], indices: Sequence[Any]) -> None:
        self._wanted, self._parts, self._indices = wanted, parts, indices

    def __iter__(self) -> Iterator[Any]:
        for part in self._wanted:
            self._parts.append(part)
            for number in part:
                yield self._indices[number]


def _skip(batches: Iterator[Any]) -> None:
    with contextlib.suppress(Exception):  # it belongs to a part that failed, which has its own error
        next(batches)


def whole(loader: DataLoader[Any]) -> WholeLoader | Stream:
    """All that a loader reads, whoever it was sharded for."""
    guide = loader_object.guide_of(loader)
    own_iteration = type(copy.copy(loader)).__iter__ is not DataLoader.__iter__
    if isinstance(loader.dataset, IterableDataset) or own_iteration:
        if guide is not None and isinstance(guide.scheme, Agreeing):
            raise ConfigError(
                'this loader was distributed with iterable="sharded", so each rank sees only its own part of the '
                "stream and parts cannot be dealt; loop over it on each rank and use sherd.mean, or pass a loader that "
                "reads the whole stream on every rank"
            )
        return Stream(loader)
    batches: Any = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return WholeLoader(loader, _drawn(batches), drawn=True)
    sampler = loader.sampler if batches is None else batches.sampler
    read = _all_read(sampler)
    order: Sequence[Any] = _drawn(sampler) if read is None else range(read)
    if batches is not None:
        size = batches.batch_size
        order = [list(order[start : start + size]) for start in range(0, len(order), size)]
    return WholeLoader(loader, order, drawn=read is None)


def _drawn(sampler: Any) -> list[Any]:
    """All that a sampler yields."""
    if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
        raise ConfigError(
            f"this loader's {type(sampler).__name__} reads the part of one rank, so that some samples would be read "
            f"twice or never; pass a loader over the whole dataset: DataLoader(dataset, batch_size=...)"
        )
    generator = getattr(sampler, "generator", None)
    if generator is None:
        return list(sampler)
    state = generator.get_state()
    try:
        return list(sampler)
    finally:
        generator.set_state(state)  # training draws on from where it was


def _all_read(sampler: Any) -> int | None:
    """How many samples all ranks together read, if they read the first ones, each once and in whatever order."""
    if type(sampler) is SequentialSampler:
        return len(sampler)
    if type(sampler) is DistributedSampler:
        return len(sampler.dataset)  # type: ignore[arg-type]
    whole = type(sampler) is RandomSampler and not sampler.replacement
    return len(sampler) if whole and len(sampler) == len(sampler.data_source) else None
