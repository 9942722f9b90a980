"""Which scheme a loader is sharded by, and which loaders are refused.

First every rank makes a plan, which changes nothing; then the ranks compare their plans; then the loaders are changed.
"""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, IterableDataset, IterDataPipe, Subset

from sherd.comm import Communicator
from sherd.config import LoaderOptions
from sherd.data.dealing import Seat
from sherd.data.iterable import Agreeing, Splitting
from sherd.data.loader import attach
from sherd.data.restore import as_it_is
from sherd.data.samplers import Batches, Dealing, Samples, SingleRank
from sherd.data.scheme import ShardingScheme, length
from sherd.errors import ConfigError, Diverged

_known: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()


@dataclass(frozen=True)
class Sharding:
    """How a loader is to be sharded. In a world of one it keeps its order and seeds, and is only counted."""

    loader: DataLoader[Any]
    batch: int | None
    """samples per rank and iteration; None where sherd does not decide it"""
    scheme: ShardingScheme
    common: dict[str, Any]
    """what must be the same on all ranks"""
    sampler: tuple[str, int, int] | None
    """name, number of replicas and rank of a sampler that is already distributed"""

    def apply(self, undo: ExitStack, trains: bool = False) -> None:
        """Shard the loader, in place; `undo` gets what reverts it.

        `trains` tells the recorder that its batches are the ones that steps train on.
        """
        undo.callback(as_it_is(self.loader))
        undo.callback(_known.discard, self.loader)
        batches: Any = self.loader.batch_sampler
        if self.batch is not None and self.batch != batches.batch_size:
            _set_batch_size(self.loader, self.batch)
        attach(self.loader, self.scheme, trains, alone=isinstance(self.scheme, SingleRank))
        _known.add(self.loader)


def plan(
    loader: DataLoader[Any], comm: Communicator, options: LoaderOptions, accumulate: int, team: int | None = None
) -> Sharding:
    """How `loader` is to be sharded over these ranks; refuses one that cannot be. Changes nothing; not collective.

    Ranks train in teams of `team` consecutive ones; None: all together.
    """
    _check(loader)
    batch = _batch_size(loader, comm.world, options.global_batch, accumulate)
    if comm.world == 1:
        by_index = loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)
        by_index = by_index and (loader.in_order or not loader.num_workers)
        return Sharding(loader, batch, SingleRank(comm, by_index), {}, None)
    size = team or comm.world
    first = comm.rank - comm.rank % size
    seat = Seat(comm.rank, comm.world, range(first, first + size))
    if isinstance(loader.dataset, IterableDataset):
        return _iterable(loader, comm, seat, options.iterable, batch)
    batches: Any = loader.batch_sampler
    samplers: list[Any] = [loader.sampler, batches, getattr(batches, "sampler", None)]
    for sampler in samplers:
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            scheme = Agreeing(comm, seat, [thing for thing in (sampler, batches) if thing is not None])
            own = (type(sampler).__name__, sampler.num_replicas, sampler.rank)
            return Sharding(loader, batch, scheme, {"scheme": "by its own sampler"}, own)
    return _dealt(loader, comm, seat, batch)


def compare(comm: Communicator, shardings: Sequence[Sharding]) -> None:
    """Refuse loaders that differ between ranks. Collective, unless there are none."""
    if not shardings:
        return
    everybody, _ = comm.compare_object([(each.common, each.sampler) for each in shardings])
    for loaders in zip(*everybody, strict=True):
        _compare_common([common for common, _ in loaders])
        samplers = [sampler for _, sampler in loaders if sampler is not None]
        if samplers:
            _compare_samplers(samplers)


def shard(loader: DataLoader[Any], comm: Communicator, options: LoaderOptions, accumulate: int) -> None:
    """Shard one loader over the ranks, in place. Collective."""
    sharding = plan(loader, comm, options, accumulate)
    compare(comm, [sharding])
    with ExitStack() as undo:
        sharding.apply(undo)
        undo.pop_all()


def announce(sharding: Sharding, comm: Communicator, accumulate: int) -> None:
    """Rank 0 prints how many samples a step takes."""
    if sharding.batch is not None and comm.rank == 0:
        print(f"sherd: {equation(sharding.batch, comm.world, accumulate)}", file=sys.stderr)


def equation(batch: int, world: int, accumulate: int) -> str:
    """How many samples a step takes, and why."""
    times = f" x accumulate {accumulate}" if accumulate > 1 else ""
    return f"global {batch * world * accumulate} = {world} rank{'s' if world > 1 else ''} x {batch}{times}"


def _check(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"distribute expected a loader, found a {type(loader).__name__}; pass a torch.utils.data.DataLoader, "
            f"or leave it out and give each rank its own data"
        )
    if loader in _known:
        raise ConfigError("this loader is already distributed; pass it to sherd.distribute once")


# ---------------------------------------------------------------- batch sizes


def _batch_size(loader: DataLoader[Any], world: int, global_batch: int | None, accumulate: int) -> int | None:
    """Samples per rank and iteration; None where sherd does not decide it."""
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
    own = vars(loader)  # torch refuses assignments to these, because its iterators would not notice
    own["batch_sampler"] = BatchSampler(batches.sampler, batch, batches.drop_last)
    if loader.batch_size is not None:
        own["batch_size"] = batch
    loader._iterator = None


# ---------------------------------------------------------------- schemes


def _dealt(loader: DataLoader[Any], comm: Communicator, seat: Seat, batch: int | None) -> Sharding:
    batches: Any = loader.batch_sampler
    drop_last = batch is not None and batches.drop_last
    indices: Samples | Batches
    if batches is not None and batch is None:
        indices = Batches(comm, seat, batches)
    else:
        sampler = loader.sampler if batches is None else batches.sampler
        indices = Samples(comm, seat, sampler, batch, drop_last)
    _check_in_order(loader, comm, full=drop_last)
    common = {"scheme": "dealt", "batch_size": batch, "drop_last": drop_last, "samples": length(loader.dataset)}
    common["subset"] = subset_checksum(loader.dataset)
    return Sharding(loader, batch, Dealing(comm, indices), common, None)


def _iterable(
    loader: DataLoader[Any], comm: Communicator, seat: Seat, iterable: str | None, batch: int | None
) -> Sharding:
    kind = type(loader.dataset).__name__
    if iterable is None:
        raise ConfigError(
            f"rank {comm.rank}: this loader reads an IterableDataset ({kind}), and only you know what it yields "
            f'on each rank; write distribute(..., iterable="split") if every rank gets the whole stream and '
            f'its batches are to be dealt to the ranks, or iterable="sharded" if the dataset already gives each rank '
            f"its own part"
        )
    if iterable == "sharded":
        return Sharding(loader, batch, Agreeing(comm, seat), {"scheme": "sharded by its dataset"}, None)
    if isinstance(loader.dataset, IterDataPipe):
        raise ConfigError(
            f"rank {comm.rank}: torch may have sharded this data pipe already, so its batches cannot be dealt; "
            f'give it a sharding_filter and write iterable="sharded"'
        )
    _check_in_order(loader, comm, full=False)
    common = {"scheme": "split", "batch_size": batch, "drop_last": loader.drop_last}
    return Sharding(loader, batch, Splitting(comm, seat, loader.drop_last), common, None)


def _check_in_order(loader: DataLoader[Any], comm: Communicator, full: bool) -> None:
    """Batches must arrive in the order in which they were dealt, unless all are full."""
    if loader.num_workers and not loader.in_order and not full:
        raise ConfigError(
            f"rank {comm.rank}: with in_order=False ranks may reach the smaller last batch at different times; "
            f"write in_order=True"
        )


def subset_checksum(dataset: Any) -> int:
    """A checksum of the subset chosen: `random_split` depends on the seed, which may differ between ranks."""
    if isinstance(dataset, ConcatDataset):
        return zlib.crc32(repr([subset_checksum(part) for part in dataset.datasets]).encode())
    if isinstance(dataset, Subset):
        return zlib.crc32(repr([int(index) for index in dataset.indices]).encode(), subset_checksum(dataset.dataset))
    return 0


# ---------------------------------------------------------------- comparing ranks


def _compare_common(everybody: Sequence[dict[str, Any]]) -> None:
    for rank, mine in enumerate(everybody):
        for name, value in mine.items():
            other = everybody[0].get(name)
            if value == other:
                continue
            what = f"rank 0's has {name}={other} where rank {rank}'s has {name}={value}"
            if name == "scheme":
                what = f"rank 0's is {other} where rank {rank}'s is {value}"
            if name == "subset":
                what = (
                    f"rank 0 and rank {rank} chose different samples (give random_split a generator with a fixed seed)"
                )
            raise Diverged(
                f"the ranks' loaders differ: {what}; pass the same loader on every rank, or leave it out if each "
                f"rank has its own data",
                ranks=(0, rank),
            )


def _compare_samplers(everybody: Sequence[tuple[str, int, int]]) -> None:
    """Refuse distributed samplers that are not set up for exactly these ranks."""
    world = len(everybody)
    for rank, (name, replicas, _) in enumerate(everybody):
        if replicas != world:
            raise ConfigError(
                f"rank {rank}'s {name} has num_replicas={replicas} where there are {world} ranks; write "
                f"num_replicas={world}, or leave the sampler out: sherd shards the loader"
            )
    numbers = [number for _, _, number in everybody]
    if len(set(numbers)) != world:
        raise ConfigError(
            f"the ranks' {everybody[0][0]}s have rank={numbers}, so some samples would be read twice and others never; "
            f"give each rank its own number, or leave the sampler out: sherd shards the loader"
        )
