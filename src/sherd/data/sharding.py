"""Which way a loader is sharded, and what is refused."""

from __future__ import annotations

import sys
import weakref
import zlib
from typing import Any

from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, IterableDataset, IterDataPipe, Subset

from sherd.comm import Communicator
from sherd.config import LoaderOptions
from sherd.data.iterable import Agreeing, Splitting
from sherd.data.loader import adopt
from sherd.data.samplers import Batches, Dealing, Samples
from sherd.data.way import Way, length
from sherd.errors import ConfigError, Diverged

_known: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()


def shard(
    loader: DataLoader[Any], comm: Communicator, options: LoaderOptions, accumulate: int, announce: bool = True
) -> None:
    """Shard `loader` over the ranks, in place; a world of one leaves it as it is, but for `global_batch`. Collective.

    `announce`: rank 0 prints how many samples a step takes.
    """
    _check(loader)
    batch = _batch_size(loader, comm.world, options.global_batch, accumulate)
    way = _way(loader, comm, options, batch) if comm.world > 1 else None
    if options.global_batch is not None and batch is not None:
        _set_batch_size(loader, batch)
    if way is not None:
        adopt(loader, way)
    _known.add(loader)
    if announce and batch is not None and comm.rank == 0:
        print(f"sherd: {equation(batch, comm.world, accumulate)}", file=sys.stderr)


def equation(batch: int, world: int, accumulate: int) -> str:
    """How many samples a step takes, and why."""
    times = f" x accumulate {accumulate}" if accumulate > 1 else ""
    return f"global {batch * world * accumulate} = {world} rank{'s' if world > 1 else ''} x {batch}{times}"


def _check(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"distribute found a {type(loader).__name__} where it takes a loader; pass a torch.utils.data.DataLoader, "
            f"or leave it out and give each rank its own data"
        )
    if loader in _known:
        raise ConfigError("this loader is distributed already; pass it to sherd.distribute once")


# ---------------------------------------------------------------- batch sizes


def _batch_size(loader: DataLoader[Any], world: int, global_batch: int | None, accumulate: int) -> int | None:
    """Samples per rank and iteration; None where sherd has no say in it."""
    batches = loader.batch_sampler
    if global_batch is None:
        return batches.batch_size if type(batches) is BatchSampler else None
    if type(batches) is not BatchSampler:
        found = "makes no batches (batch_size=None)" if batches is None else f"has its own {type(batches).__name__}"
        raise ConfigError(
            f"global_batch={global_batch} cannot set the batch size of a loader that {found}; leave global_batch out, "
            f"or build it with DataLoader(dataset, batch_size=...)"
        )
    size, rest = divmod(global_batch, world * accumulate)
    if rest:
        values = [n * world * accumulate for n in (size, size + 1) if n]
        raise ConfigError(
            f"global_batch={global_batch} cannot be dealt evenly: {world} ranks x accumulate {accumulate} take a "
            f"multiple of {world * accumulate}; write {' or '.join(f'global_batch={value}' for value in values)}"
        )
    return size


def _set_batch_size(loader: DataLoader[Any], batch: int) -> None:
    batches: Any = loader.batch_sampler
    own = vars(loader)  # torch refuses to set these, as its iterators would not know of it
    own["batch_sampler"] = BatchSampler(batches.sampler, batch, batches.drop_last)
    if loader.batch_size is not None:
        own["batch_size"] = batch
    loader._iterator = None


# ---------------------------------------------------------------- ways


def _way(loader: DataLoader[Any], comm: Communicator, options: LoaderOptions, batch: int | None) -> Way:
    if isinstance(loader.dataset, IterableDataset):
        return _iterable_way(loader, comm, options.iterable, batch)
    batches: Any = loader.batch_sampler
    for sampler in (loader.sampler, batches, getattr(batches, "sampler", None)):
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            _check_distributed(sampler, comm)
            return Agreeing(comm, [thing for thing in (sampler, batches) if thing is not None])
    drop_last = batch is not None and batches.drop_last
    indices: Samples | Batches
    if batches is not None and batch is None:
        indices = Batches(comm, batches)
    else:
        sampler = loader.sampler if batches is None else batches.sampler
        indices = Samples(comm, sampler, batch, drop_last)
    _check_in_order(loader, comm, full=drop_last)
    mine = {"batch_size": batch, "drop_last": drop_last, "samples": length(loader.dataset)}
    _compare(comm, mine, _chosen(loader.dataset))
    return Dealing(comm, indices)


def _iterable_way(loader: DataLoader[Any], comm: Communicator, iterable: str | None, batch: int | None) -> Way:
    kind = type(loader.dataset).__name__
    if iterable is None:
        raise ConfigError(
            f"rank {comm.rank}: this loader reads an IterableDataset ({kind}), and only you know what it gives to each "
            f'of {comm.world} ranks; write distribute(..., iterable="split") if every rank gets the whole stream, so '
            f'that its batches are to be dealt to the ranks, or iterable="sharded" if the dataset gives each rank a '
            f"part of its own"
        )
    if iterable == "sharded":
        return Agreeing(comm)
    if isinstance(loader.dataset, IterDataPipe):
        raise ConfigError(
            f"rank {comm.rank}: a data pipe may be sharded by torch already, so its batches cannot be dealt; give it a "
            f'sharding_filter and write iterable="sharded"'
        )
    _check_in_order(loader, comm, full=False)
    _compare(comm, {"batch_size": batch, "drop_last": loader.drop_last})
    return Splitting(comm, loader.drop_last)


def _check_distributed(sampler: Any, comm: Communicator) -> None:
    """A sampler that is distributed by itself is so over these ranks. Collective."""
    with comm.counters.agreeing():
        everybody = comm.all_gather_object((sampler.num_replicas, sampler.rank))
    name = type(sampler).__name__
    for rank, (replicas, _) in enumerate(everybody):
        if replicas != comm.world:
            raise ConfigError(
                f"rank {rank}'s {name} has num_replicas={replicas} where there are {comm.world} ranks; write "
                f"num_replicas={comm.world}, or leave the sampler out: sherd shards the loader"
            )
    if len({number for _, number in everybody}) != comm.world:
        raise ConfigError(
            f"the ranks' {name}s have rank={[number for _, number in everybody]}, so some samples would come twice and "
            f"others never; give each rank its own number, or leave the sampler out: sherd shards the loader"
        )


def _check_in_order(loader: DataLoader[Any], comm: Communicator, full: bool) -> None:
    """Batches must come in the order in which they were dealt, unless all are full."""
    if loader.num_workers and not loader.in_order and not full:
        raise ConfigError(
            f"rank {comm.rank}: with in_order=False ranks may come to the last, smaller batch at different times; "
            f"write in_order=True"
        )


def _chosen(dataset: Any) -> int:
    """A checksum of what was chosen of a dataset: `random_split` chooses by the seed, which ranks may not share."""
    if isinstance(dataset, ConcatDataset):
        return zlib.crc32(repr([_chosen(part) for part in dataset.datasets]).encode())
    if isinstance(dataset, Subset):
        return zlib.crc32(repr([int(index) for index in dataset.indices]).encode(), _chosen(dataset.dataset))
    return 0


def _compare(comm: Communicator, mine: dict[str, Any], chosen: int = 0) -> None:
    """Refuse loaders that differ between ranks. Collective."""
    everybody, rank = comm.compare_object({**mine, "subset": chosen})
    for name, value in everybody[rank].items():
        other = everybody[0].get(name)
        if value == other:
            continue
        what = f"rank 0's has {name}={other} where rank {rank}'s has {name}={value}"
        if name == "subset":
            what = f"rank 0 and rank {rank} chose different samples (give random_split a generator with a fixed seed)"
        raise Diverged(
            f"the ranks' loaders differ: {what}; pass the same loader on every rank, or leave it out if each has its "
            f"own data",
            ranks=(0, rank),
        )
