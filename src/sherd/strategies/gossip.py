"""Gossip: every rank trains a model of its own, and mixes its parameters with those of a few neighbours.

After its update x, rank i takes y_i = sum of w_ij x_j over its neighbours j and itself. Where rows of the matrix do not
sum to 1 (`push_sum`), a rank also holds a mass m_i, which is mixed in the same way, and its model is z = y / m. An
update of z is added to the numerators: x = m z_old + (z_new - z_old). Masses follow from the matrix: none is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sherd.comm import Communicator, Handle, Neighbours, Shown
from sherd.config import at_least, one_of
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.parameters.mesh import Teams
from sherd.engine.policy import Drift, ExchangePolicy, StepContext
from sherd.layout.topology import TOPOLOGIES, check_matrix, read_matrix, topology_of
from sherd.strategies.base import Strategy
from sherd.strategies.local import Apart
from sherd.strategies.registry import register


class GossipPolicy(Apart):
    """Gradients stay on their rank; parameters are mixed with those of neighbours after an update."""

    def __init__(self, options: Gossip, device: torch.device) -> None:
        self._options, self._device = options, device
        self._shown: dict[Bucket, Shown] = {}
        self._masses: dict[Bucket, tuple[float, ...]] = {}  # with push-sum, of all ranks; none: 1 each
        self._begun: set[Bucket] = set()  # with push-sum, those whose shown memory has z_old
        self.drift = Drift()

    def join(self, teams: Teams, buckets: BucketList) -> None:
        self._everyone = teams.everyone
        self._topology = topology_of(self._options.topology, teams.across.world)
        self._neighbours = Neighbours(teams.across, self._device)
        self._rooms(buckets.buckets)

    def sums(self, step: int) -> bool:
        return step < self._options.warmup

    def decide_together(self, step: int, teams: Teams) -> Communicator:
        return teams.everyone

    def shares_buffers(self, step: int) -> bool:
        return self.sums(step)

    def reduce(self, bucket: Bucket, source: Tensor, target: Tensor, op: str, own: Tensor | None = None) -> Handle:
        return self._everyone.all_reduce(source, target, op=op)

    def before_update(self, s: StepContext) -> None:
        super().before_update(s)
        if self._options.push_sum:
            for bucket, shown in self._rooms([bucket for bucket in s.buckets if bucket not in self._begun]):
                shown.own.copy_(bucket.values.whole)
                self._begun.add(bucket)

    def after_update(self, s: StepContext) -> None:
        number, place = divmod(s.step - self._options.warmup, self._options.every)
        if number >= 0 and place == self._options.every - 1:
            self._mix(s, number)
        self.drift = Drift(since=(place + 1) % self._options.every if number >= 0 else 0, partial=number >= 0)
        super().after_update(s)

    def skipped(self, s: StepContext) -> None:
        self.before_update(s)
        self.after_update(s)

    def agree_values(self, s: StepContext) -> None:
        for bucket in s.buckets:
            self._numerators(bucket, s.across.rank, bucket.values.whole)
        super().agree_values(s)

    def loaded(self, buckets: BucketList) -> None:
        self._masses.clear()  # all ranks have the same values now

    def bytes(self) -> dict[str, int]:
        return {"neighbours": self._neighbours.bytes}

    def _mix(self, s: StepContext, number: int) -> None:
        me, rooms = s.across.rank, self._rooms(s.buckets)
        for bucket, shown in rooms:
            self._numerators(bucket, me, shown.own)
        values = [bucket.values.whole for bucket in s.buckets]
        rounds = [self._topology.at(number, 53 if each.dtype == torch.float64 else 24) for each in values]
        targets = self._topology.at(number).targets(me)
        self._neighbours.mix([shown for _, shown in rooms], values, [each.rows[me] for each in rounds], targets)
        if self._options.push_sum:
            for bucket, mixing in zip(s.buckets, rounds, strict=True):
                self._masses[bucket] = mixing.of_mass(self._masses.get(bucket, (1.0,) * s.across.world))
                bucket.values.whole.div_(self._masses[bucket][me])
            self._begun.difference_update(s.buckets)

    def _numerators(self, bucket: Bucket, rank: int, into: Tensor) -> None:
        """What this rank mixes: its values, times its mass without what it added since the last mixing."""
        whole, mass = bucket.values.whole, self._masses.get(bucket)
        if mass is None:
            into.copy_(whole)
        else:
            old = self._shown[bucket].own if bucket in self._begun else whole
            torch.add(whole, old, alpha=mass[rank] - 1.0, out=into)

    def _rooms(self, buckets: Sequence[Bucket]) -> list[tuple[Bucket, Shown]]:
        """What each bucket shows, free to be overwritten. Those that were frozen until now get it here: collective."""
        new = [bucket for bucket in buckets if bucket not in self._shown]
        self._shown.update(zip(new, self._neighbours.room([each.values.whole for each in new]), strict=True))
        self._neighbours.wait_until_read()
        return [(bucket, self._shown[bucket]) for bucket in buckets]


@register("gossip", elsewhere=("d-psgd", "sgp", "stochastic gradient push", "decentralized", "neighbor allreduce"))
@dataclass(frozen=True, kw_only=True)
class Gossip(Strategy):
    """Every rank trains its own model on its own batches, and mixes parameters with a few neighbours after a step."""

    topology: Any = "one-peer-exponential"
    """Who mixes with whom: "ring", "exponential" or "one-peer-exponential" (docs/gossip.md), or a matrix whose row i
    has what rank i takes of each rank: nested lists, a tensor or an array."""

    every: int = 1
    """Mix after every so many steps."""

    push_sum: bool = False
    """Divide by the mass that each rank holds: for matrices whose columns sum to 1, but not their rows."""

    warmup: int = 0
    """Steps at the beginning in which gradients are summed over all ranks, as under ddp."""

    def validate(self) -> None:
        at_least(self, "every", 1)
        at_least(self, "warmup", 0)
        if isinstance(self.topology, str):
            one_of(self, "topology", TOPOLOGIES)
        else:
            object.__setattr__(self, "topology", read_matrix(self.topology))
            check_matrix(self.topology, self.push_sum)

    def team(self, comm: Communicator) -> int:
        if comm.world > 1:  # alone, there is nobody to mix with, whatever the topology
            topology_of(self.topology, comm.world)
        return 1

    def policy(self, comm: Communicator, device: torch.device) -> ExchangePolicy:
        return GossipPolicy(self, device)
