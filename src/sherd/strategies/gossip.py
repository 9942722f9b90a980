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
from sherd.engine.policy import ExchangePolicy, StepContext
from sherd.layout.topology import TOPOLOGIES, check_matrix, read_matrix, topology_of
from sherd.strategies.base import Strategy
from sherd.strategies.registry import register


class GossipPolicy(ExchangePolicy):
    """Gradients stay on their rank; parameters are mixed with those of neighbours after an update."""

    bucket_bytes = 256 << 10  # larger gradients are read where they are, as in a world of one

    def __init__(self, options: Gossip, device: torch.device) -> None:
        self._options = options
        self._device = device
        self._shown: dict[Bucket, Shown] = {}
        self._masses: dict[Bucket, tuple[float, ...]] = {}  # of all ranks; none: 1 each

    def join(self, teams: Teams, buckets: BucketList) -> None:
        self._everyone = teams.everyone
        self._topology = topology_of(self._options.topology, teams.across.world)
        self._neighbours = Neighbours(teams.across, self._device)
        self._rooms(buckets.buckets)

    def sums(self, step: int) -> bool:
        return step < self._options.warmup

    def decide_together(self, step: int, teams: Teams) -> Communicator:
        return teams.everyone

    def exchanges(self, step: int) -> bool:
        return False

    def shares_buffers(self, step: int) -> bool:
        return self.sums(step)

    def reduce(self, bucket: Bucket, source: Tensor, target: Tensor, op: str, own: Tensor | None = None) -> Handle:
        return self._everyone.all_reduce(source, target, op=op)

    def before_update(self, s: StepContext) -> None:
        super().before_update(s)
        if self._options.push_sum and self._place(s.step)[1] == 0:  # from here on, updates are added to numerators
            for bucket, shown in self._rooms(s.buckets):
                shown.own.copy_(bucket.values.whole)

    def after_update(self, s: StepContext) -> None:
        number, place = self._place(s.step)
        if number >= 0 and place == self._options.every - 1:
            self._mix(s, number)
        super().after_update(s)

    def skipped(self, s: StepContext) -> None:
        self.before_update(s)
        self.after_update(s)

    def loaded(self, buckets: BucketList) -> None:
        self._masses.clear()  # all ranks have the same values now

    def _place(self, step: int) -> tuple[int, int]:
        """The round that this step leads to, from 0, and how many steps before it did."""
        return divmod(step - self._options.warmup, self._options.every)

    def _mix(self, s: StepContext, number: int) -> None:
        me, rooms, masses = s.across.rank, self._rooms(s.buckets), self._masses
        ones = (1.0,) * s.across.world
        for bucket, shown in rooms:
            if self._options.push_sum:
                mass = masses.setdefault(bucket, ones)[me]
                shown.own.mul_(mass - 1.0).add_(bucket.values.whole)
            else:
                shown.own.copy_(bucket.values.whole)
        values = [bucket.values.whole for bucket, _ in rooms]
        rounds = [self._topology.at(number, 53 if each.dtype == torch.float64 else 24) for each in values]
        targets = self._topology.at(number).targets(me)
        self._neighbours.mix([shown for _, shown in rooms], values, [each.rows[me] for each in rounds], targets)
        if self._options.push_sum:
            mixed: dict[object, tuple[float, ...]] = {}  # nearly all buckets have the same masses
            for (bucket, _), mixing in zip(rooms, rounds, strict=True):
                key = (id(mixing), masses[bucket])
                if key not in mixed:
                    mixed[key] = mixing.of_mass(masses[bucket])
                masses[bucket] = mixed[key]
                bucket.values.whole.div_(masses[bucket][me])

    def _rooms(self, buckets: Sequence[Bucket]) -> list[tuple[Bucket, Shown]]:
        """What each bucket shows, free to be overwritten. Those that were frozen until now get it here: collective."""
        new = [bucket for bucket in buckets if bucket not in self._shown]
        for dtype in dict.fromkeys(bucket.values.whole.dtype for bucket in new):
            alike = [bucket for bucket in new if bucket.values.whole.dtype == dtype]
            rooms = self._neighbours.room([bucket.values.whole.numel() for bucket in alike], dtype)
            self._shown.update(zip(alike, rooms, strict=True))
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
