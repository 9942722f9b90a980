"""The process group that carries the bytes of the c10d transport.

Its own methods are called, not the functions of torch.distributed: those know only groups that are registered, and
cost some microseconds more for each call.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

# A forked process has the groups of the rank that it comes from, but not their threads: whose end they would wait for
# if they were collected there.
_groups: weakref.WeakSet[Any] = weakref.WeakSet()
_inherited: list[Any] = []
os.register_at_fork(after_in_child=lambda: _inherited.extend(_groups))

NewGroup = Callable[[Sequence[int], timedelta], "Wire"]
"""new_group(ranks, timeout): a wire among some of the ranks; all of these call it."""


@dataclass(frozen=True)
class Wire:
    """A process group that nobody else uses, and the store of its ranks. Every operation is asynchronous."""

    group: Any  # a ProcessGroup or a Backend of torch: they have the same methods
    rank: int
    world: int
    store: Store
    device: torch.device
    world_ranks: Sequence[int]  # for messages
    subgroup: NewGroup

    def __post_init__(self) -> None:
        _groups.add(self.group)

    def all_gather(self, output: Tensor, input: Tensor) -> dist.Work:
        options = AllgatherOptions()
        options.asyncOp = True
        work: dist.Work = self.group._allgather_base(output, input, options)
        return work

    def all_to_all(
        self, output: Tensor, input: Tensor, out_splits: Sequence[int] = (), in_splits: Sequence[int] = ()
    ) -> dist.Work:
        options = AllToAllOptions()
        options.asyncOp = True
        work: dist.Work = self.group.alltoall_base(output, input, list(out_splits), list(in_splits), options)
        return work

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = root, 0, True
        work: dist.Work = self.group.broadcast([tensor], options)
        return work

    def all_reduce(self, tensor: Tensor, op: Any) -> dist.Work:
        options = AllreduceOptions()
        options.reduceOp, options.asyncOp = op, True
        work: dist.Work = self.group.allreduce([tensor], options)
        return work

    def reduce_scatter(self, output: Tensor, input: Tensor, op: Any) -> dist.Work:
        options = ReduceScatterOptions()
        options.reduceOp, options.asyncOp = op, True
        work: dist.Work = self.group._reduce_scatter_base(output, input, options)
        return work

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> dist.Work:
        work: dist.Work = self.group.send([tensor], to, tag)
        return work

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> dist.Work:
        work: dist.Work = self.group.recv([tensor], source, tag)
        return work


def over_group(group: dist.ProcessGroup, store: Store | None = None) -> Wire:
    """Over a group that torch.distributed has registered. `store` is where its ranks meet, by default the group's own,
    which torch gives to another group of the same name after it was destroyed."""
    ranks = dist.get_process_group_ranks(group)
    place = store or dist.distributed_c10d._get_process_group_store(group)

    def subgroup(members: Sequence[int], timeout: timedelta) -> Wire:
        world_ranks = [ranks[r] for r in members]
        some = dist.new_group(world_ranks, timeout, use_local_synchronization=True, backend=backend_of())
        return over_group(some, PrefixStore(some.group_name, place))

    device = torch.device("cpu" if "gloo" in dist.get_backend_config(group) else "cuda")
    return Wire(group, dist.get_rank(group), len(ranks), place, device, ranks, subgroup)


def over_gloo(store: Store, rank: int, world_ranks: Sequence[int], timeout: timedelta) -> Wire:
    """Over a gloo group of its own, which torch.distributed does not know. Collective among `world_ranks`."""
    made: dict[tuple[int, ...], int] = {}

    def subgroup(members: Sequence[int], limit: timedelta) -> Wire:
        key = tuple(members)
        made[key] = made.get(key, 0) + 1
        place = PrefixStore(f"{'-'.join(map(str, members))}/{made[key]}", store)
        return over_gloo(place, key.index(rank), [world_ranks[r] for r in members], limit)

    world = len(world_ranks)
    group = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, world, timeout=timeout)
    return Wire(group, rank, world, store, torch.device("cpu"), world_ranks, subgroup)


def backend_of() -> str | None:
    """The backend for new groups: torch's default, unless that is sherd's own, which stands on these."""
    return "gloo" if dist.get_backend() == "sherd" else None
