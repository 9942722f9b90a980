"""ZeRO: optimizer state (stage 1), then gradients (2), then parameters (3) are sharded over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sherd.comm import Communicator, Handle
from sherd.config import at_least, one_of, refuse
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.policy import AccumulateAt, ExchangePolicy, Home, Keeps, Owns
from sherd.strategies.base import Strategy
from sherd.strategies.registry import register


class Sharded(ExchangePolicy):
    """Gradients are summed slice by slice; owners update their slices, and the store makes them visible to all.

    What an optimizer must have whole is not cut: one rank owns all of a bucket.
    """

    owns = Owns.SLICE

    def __init__(self, stage: int, home: Home, shard_over: int) -> None:
        self.home = home
        self.shard_over = shard_over
        self.keeps = Keeps.WHOLE if stage == 1 else Keeps.SLICES
        self.accumulate_at = AccumulateAt.RANK if stage == 1 else AccumulateAt.OWNER

    def reduce(self, bucket: Bucket, source: Tensor, target: Tensor, op: str, own: Tensor | None = None) -> Handle:
        if bucket.holder is not None:
            return bucket.comm.reduce(source, target, root=bucket.holder, op=op, own=own)
        return bucket.comm.reduce_scatter(source, target, op=op, own=own)


@dataclass(frozen=True, kw_only=True)
class ZeRO(Strategy):
    """Every rank updates the slices that it owns, with its part of the optimizer state.

    On one host its ranks share one copy of the parameters at every stage: updates need no communication.
    """

    stage: int = 2
    """1: optimizer state is sharded; 2: gradients too; 3: parameters too."""

    shard_over: str | int = "world"
    """Over how many ranks parameters are sharded: "world", "host", or a number of consecutive ranks. Each group of that
    size has one copy: sharded inside, replicated across. At stage 3 parameters are gathered inside the group; at stages
    1 and 2 updates are exchanged between groups first, then inside. Gradients and optimizer state are always sharded
    over all ranks: that takes less memory than replicating them, and no more traffic."""

    share_host_memory: bool = True
    """Keep one copy of the parameters per host, where ranks can share memory. False: every rank has its own copy, and
    updated slices are gathered; at stage 3 every rank keeps its slices and gathers parameters while they are used."""

    def validate(self) -> None:
        if self.stage not in (1, 2, 3):
            refuse(self, "stage", "1, 2 or 3", "stage=2")
        if isinstance(self.shard_over, str):
            one_of(self, "shard_over", ("world", "host"))
        else:
            at_least(self, "shard_over", 1)

    @property
    def name(self) -> str:  # type: ignore[override]
        """What users write for this stage."""
        return f"zero{self.stage}"

    def policy(self, comm: Communicator, device: torch.device) -> ExchangePolicy:
        size = self._group_size(comm)
        home = self._home(comm, device, size)
        # A host has one copy anyway: no groups needed.
        return Sharded(self.stage, home, comm.world if home is Home.HOST else size)

    def _home(self, comm: Communicator, device: torch.device, size: int) -> Home:
        shared, local = self.share_host_memory and comm.shares_memory and device.type == "cpu", comm.host.world
        if shared and (self.stage < 3 or size <= local):
            return Home.HOST
        if self.stage < 3:
            return Home.PRIVATE
        together = shared and local > 1 and size % local == 0
        return Home.GATHERED_BY_HOST if together else Home.GATHERED

    def _group_size(self, comm: Communicator) -> int:
        size = {"world": comm.world, "host": comm.ranks_per_host}.get(str(self.shard_over), self.shard_over)
        if size is None:
            refuse(self, "shard_over", "possible: the hosts do not all have as many consecutive ranks", "a number")
        assert isinstance(size, int), "validate() has seen it"
        if comm.world % size:
            refuse(self, "shard_over", f"a number that divides the {comm.world} ranks", 'shard_over="world"')
        return size


_ANY_STAGE = ("zero", "deepspeed", "zero redundancy")
_FULLY_SHARDED = ("fsdp", "fsdp1", "fsdp2", "fully shard", "full shard", "FullyShardedDataParallel")


@register("zero1", elsewhere=(*_ANY_STAGE, "deepspeed stage 1", "zero stage 1", "ZeroRedundancyOptimizer", "oss"))
def _zero1() -> ZeRO:
    return ZeRO(stage=1)


@register("zero2", elsewhere=(*_ANY_STAGE, "deepspeed stage 2", "zero stage 2", "shard grad op", "sharded ddp"))
def _zero2() -> ZeRO:
    return ZeRO(stage=2)


@register("zero3", elsewhere=(*_ANY_STAGE, "deepspeed stage 3", "zero stage 3", *_FULLY_SHARDED))
def _zero3() -> ZeRO:
    return ZeRO(stage=3)
