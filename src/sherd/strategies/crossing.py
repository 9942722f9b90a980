"""What teams exchange: values of parameters, flat, with the ranks at the same place in the other teams.

A rank exchanges its *share* of every bucket: the slice that it owns inside its team, or one of the equal slices where
the ranks of a team all have and update the whole. So every value crosses once, whatever the size of a team.

Where an exchange is to go on while ranks compute, its parts are messages, which every transport moves on by itself.
A collective over torch.distributed first waits until all ranks have made the call.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from sherd.comm import Communicator, Handle
from sherd.comm.summation import combine
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.parameters.mesh import Teams
from sherd.errors import Diverged

Item = TypeVar("Item")
TOGETHER_BYTES = 32 << 20
"""How much is exchanged at once: enough for any network, and little beside a model."""


def share_of(bucket: Bucket, owned: Tensor) -> Tensor:
    """What this rank exchanges of what it owns: of a bucket's values, or of a tensor of optimizer state as long."""
    team = bucket.comm
    return owned.view(team.world, -1)[team.rank] if _replicated(bucket) else owned


def values_of(bucket: Bucket) -> Tensor:
    """What this rank exchanges of a bucket's values."""
    return share_of(bucket, bucket.values.owned.detach())


def _replicated(bucket: Bucket) -> bool:
    """Whether all ranks of a team have and update the whole bucket, so that shares are to be gathered inside it."""
    whole = bucket.holder is None and bucket.values.owned.numel() == bucket.described.numel
    return bucket.comm.world > 1 and whole


def gather_shares(written: Iterable[tuple[Bucket, Tensor]]) -> None:
    """The share of each of these was written: give it to the rest of the team, where the store does not."""
    those = [(bucket, owned) for bucket, owned in written if _replicated(bucket)]
    for handle in [bucket.comm.all_gather(share_of(bucket, owned).clone(), owned) for bucket, owned in those]:
        handle.wait()


def together(items: Iterable[Item], tensor_of: Callable[[Item], Tensor]) -> Iterator[list[Item]]:
    """Those with tensors of one dtype and about `TOGETHER_BYTES` at a time."""
    waiting: dict[torch.dtype, list[Item]] = {}
    for item in items:
        tensor = tensor_of(item)
        group = waiting.setdefault(tensor.dtype, [])
        if group and sum(tensor_of(each).nbytes for each in group) + tensor.nbytes > TOGETHER_BYTES:
            yield group
            group = waiting[tensor.dtype] = []
        group.append(item)
    yield from waiting.values()


def spread(flat: Tensor, views: Iterable[Tensor], put: Callable[[Tensor, Tensor], object]) -> None:
    """Give each view its elements of `flat`: `put(view, elements)`."""
    at = 0
    for view in views:
        put(view, flat[at : at + view.numel()].view(view.shape))
        at += view.numel()


class Afterwards(Handle):
    """Operations under way; `then` makes the result of them, in the first `wait()`."""

    __slots__ = ("_parts", "_then")

    def __init__(self, parts: Sequence[Handle], then: Callable[[], Tensor]) -> None:
        self._parts = parts
        self._then: Callable[[], Tensor] | None = then

    def wait(self) -> Tensor:
        if self._then is not None:
            for part in self._parts:
                part.wait()
            self.result, self._then, self._parts = self._then(), None, ()
        return self.result

    def done(self) -> bool:
        return all(part.done() for part in self._parts)


def mean_of_part(across: Communicator, flat: Tensor, op: str, target: Tensor, aside: bool) -> Handle:
    """Reduce `flat`, cut into one part per team, into this rank's part. `aside`: while ranks compute."""
    if not aside:
        return across.reduce_scatter(flat, target, op=op)
    rows = flat.view(across.world, -1)
    received = [row if rank == across.rank else torch.empty_like(row) for rank, row in enumerate(rows)]
    others = [rank for rank in range(across.world) if rank != across.rank]
    under_way = [across.send(rows[rank], rank) for rank in others]
    under_way += [across.recv(received[rank], rank) for rank in others]

    def add() -> Tensor:
        combine(across.tree, received, target, op)
        return target

    return Afterwards(under_way, add)


def gather_parts(across: Communicator, part: Tensor, aside: bool) -> Handle:
    """The parts of all teams, end to end."""
    if not aside:
        return across.all_gather(part)
    rows = part.new_empty(across.world, part.numel())
    rows[across.rank].copy_(part)
    others = [rank for rank in range(across.world) if rank != across.rank]
    under_way = [across.send(part, rank) for rank in others]
    under_way += [across.recv(rows[rank], rank) for rank in others]
    return Afterwards(under_way, lambda: rows.view(-1))


class Roll:
    """How much each team counts, and whether all exchange the same: one small message per exchange."""

    def __init__(self, teams: Teams, samples: float, what: Sequence[str], step: int, aside: bool) -> None:
        self._across = teams.across
        facts = [zlib.crc32("\n".join(what).encode()), len(what), step]
        with teams.team.counters.agreeing(), teams.across.counters.agreeing():
            seen = teams.team.all_reduce(torch.tensor([samples], dtype=torch.float64)).wait()
            self._handle = gather_parts(teams.across, torch.cat([seen, seen.new_tensor(facts)]), aside)

    def factor(self) -> float | None:
        """This team's part of all samples; None if all teams have as many, so that the plain mean is right."""
        rows = self._handle.wait().view(self._across.world, -1).tolist()
        for rank, (_, digest, count, step) in enumerate(rows):
            if [digest, count, step] != rows[0][1:]:
                raise self._diverged(rank, rows[0], rows[rank])
        samples = [row[0] for row in rows]
        total = sum(samples)
        if not total or samples.count(samples[0]) == len(samples):
            return None
        return float(samples[self._across.rank] / total)

    def _diverged(self, rank: int, first: Sequence[float], other: Sequence[float]) -> Diverged:
        one, two = self._across.numbers[0], self._across.numbers[rank]
        if first[3] != other[3]:
            what = (
                f"rank {one} exchanges at step {first[3]:.0f} and rank {two} at step {other[3]:.0f}; take the same "
                f"number of steps on every rank"
            )
        else:
            what = (
                f"at step {first[3]:.0f} rank {one} exchanges {first[2]:.0f} parameters or tensors of their state, and "
                f"rank {two} {other[2]:.0f}, or others; unfreeze the same parameters on every rank before the same "
                f"step, and use each on all of them"
            )
        return Diverged(f"the teams are out of sync: {what}", ranks=(one, two))
