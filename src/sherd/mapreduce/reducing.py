"""`sherd.map_reduce`: a function of every item, reduced over all of them, on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from sherd import observe
from sherd.api.helpers.process import communicator
from sherd.errors import ConfigError
from sherd.mapreduce import keys, randomness
from sherd.mapreduce.agreeing import Settings, compared
from sherd.mapreduce.grouping import add_value, merging, reduced
from sherd.mapreduce.mapping import Job, MapPhase, Partial
from sherd.mapreduce.reductions import Reduction, reduction_of
from sherd.mapreduce.sources import Source, source_of
from sherd.mapreduce.tree import default_chunk

WHAT = "sherd.map_reduce"
PAIRS = "pairs"


def map_reduce(
    map_fn: Callable[[Any], Any],
    data: Any,
    reduce: Literal["sum", "mean", "max"] | Callable[[Any, Any], Any] = "sum",
    key: Callable[[Any], Any] | Literal["pairs"] | None = None,
    *,
    chunk: int | None = None,
    retries: int = 0,
    seed: int = 0,
    desc: str = "map_reduce",
    progress: bool = True,
) -> Any:
    """`map_fn(item)` of every item of `data`, reduced over all items; the result is on every rank. Collective.

        total = sherd.map_reduce(lambda x: x.double().sum(), dataset)
        words = sherd.map_reduce(lambda line: [(word, 1) for word in line.split()], lines, key="pairs")

    Has the same bits on any number of ranks with equally many threads: `data` is cut into chunks that do not depend on
    the ranks, and their results are merged in the order of the chunks.

    map_fn: returns a number, a tensor, or a dict, tuple or list of those, of one structure for all items. It must not
        communicate. Random numbers that it draws depend on `seed` and the chunk, and leave the program's own alone.
    data: has a length and items by number, as a list or a dataset, or is a DataLoader, whose items are its batches. A
        loader that `sherd.distribute` has sharded is read as a whole.
    reduce: "sum", "mean" (over items) or "max" (element by element), or an associative function of two values: it gets
        neighbours, in the order of the items. Tensors come back on the CPU.
    key: a function of an item. The result is then a dict with a reduced value for each key, in the order in which keys
        first appear. Or "pairs": `map_fn` returns pairs of a key and a value, any number of them for an item.
    chunk: items in a chunk. Default: at most 256 chunks. Ranks take the next chunk when they are done with their last.
    retries: how often a chunk that raises is computed again, on another rank. Then all ranks raise `ChunkFailed`.
    desc, progress: the bar on rank 0.
    """
    comm = communicator()
    job: dict[str, Any] = {}

    def prepare() -> Settings:
        _check(map_fn, key)
        with randomness.untouched():
            randomness.begin(seed, -1)
            source = source_of(data)
        reduction = reduction_of(reduce)
        options = checked_options(source, chunk, retries, seed)
        job.update(source=source, reduction=reduction, **options)
        grouped = key if key is None or key == PAIRS else "a function"
        named = reduce if isinstance(reduce, str) else "a function"
        return {"data": (source.kind, source.count, source.checksum), "reduce": named, "key": grouped, **options}

    name = compared(comm, WHAT, prepare)
    job["source"].agree(comm.broadcast_object)
    reduction: Reduction = job.pop("reduction")
    if job["source"].count == 0 and key is None:
        raise ConfigError(f"rank {comm.rank}: {WHAT} got no items, and so there is no result; check len(data) first")
    work = Job(
        WHAT,
        fold=_folding(map_fn, key, reduction),
        merge=merging(lambda _: reduction),
        desc=desc,
        progress=progress,
        **job,
    )
    began = time.monotonic()
    phase = MapPhase(comm, work, name)
    phase.run()
    record(work, phase.done, time.monotonic() - began)
    results = reduced(comm, WHAT, phase.forest, lambda _: reduction)
    if key is not None:
        return results
    if not results:
        raise ConfigError(f"rank {comm.rank}: {WHAT} got a loader without batches, and so there is no result")
    return results[None]


def record(job: Job, done: list[int], seconds: float) -> None:
    """Record what this rank did of a job."""
    observe.emit("map", name=job.desc, items=job.source.count, chunk=job.chunk, chunks=len(done), seconds=seconds)


def checked_options(source: Source, chunk: Any, retries: Any, seed: Any) -> dict[str, Any]:
    """The options of a job, checked."""
    for name, value, least in (("chunk", chunk, 1), ("retries", retries, 0), ("seed", seed, 0)):
        if value is None and name == "chunk":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"got {name}={value!r}; write a whole number of at least {least}")
    return {"chunk": chunk or default_chunk(source.count), "retries": retries, "seed": seed}


def _check(map_fn: Any, key: Any) -> None:
    if not callable(map_fn):
        raise ConfigError(
            f"got a {type(map_fn).__name__} as map_fn; write a function of an item: sherd.map_reduce(function, data)"
        )
    if key is not None and key != PAIRS and not callable(key):
        raise ConfigError(f'got key={key!r}; write a function of an item, or "pairs" if map_fn returns pairs')


def _folding(map_fn: Callable[[Any], Any], key: Any, reduction: Reduction) -> Callable[..., Partial]:
    def values(item: Any) -> Iterable[tuple[Any, Any]]:
        if key == PAIRS:
            return _pairs(map_fn(item))
        return [(None if key is None else keys.checked(key(item)), map_fn(item))]

    def fold(items: Iterator[tuple[int, Any]]) -> Partial:
        entries: Partial = {}
        for number, item in items:
            for position, (its, value) in enumerate(values(item)):
                add_value(entries, its, (number, position), value, reduction)
        return entries

    return fold


def _pairs(found: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(found, dict):
        found = found.items()
    if isinstance(found, (str, bytes)) or not isinstance(found, Iterable):
        raise ConfigError(f'with key="pairs" map_fn returns pairs of a key and a value, and it returned {found!r:.80}')
    for pair in found:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigError(f'with key="pairs" map_fn returns pairs of a key and a value, and one is {pair!r:.80}')
        yield keys.checked(pair[0]), pair[1]
