"""What averaging strategies share: teams that train apart and meet every so many steps, after a summed warm-up."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from sherd.comm import Communicator, Handle
from sherd.config import at_least, refuse
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.parameters.mesh import Teams
from sherd.engine.policy import Drift, ExchangePolicy, Owns, StepContext
from sherd.strategies.base import Strategy
from sherd.strategies.crossing import Afterwards, gather_shares
from sherd.strategies.local import Apart
from sherd.strategies.registry import resolve

log = logging.getLogger("sherd")

_DO_NOT_SUM, _INNER = ("local", "gossip"), 'inner="zero2"'


@dataclass(frozen=True, kw_only=True)
class Averaging(Strategy):
    """Teams of ranks train apart, and exchange parameters instead of gradients."""

    every: int = 50
    """How many real `step()` calls, skipped ones included, lie between two exchanges."""

    warmup: int = 0
    """So many steps are summed over all ranks first, as under ddp: early on, weights change too much to be averaged."""

    over: str | int = "ranks"
    """Who averages: "ranks", each of which trains alone; "hosts", whose ranks train together; or teams of so many
    consecutive ranks. Only one rank of each team has to send a value to the other teams."""

    inner: str | Strategy = "zero2"
    """How the ranks of a team train together."""

    def validate(self) -> None:
        at_least(self, "every", 1)
        at_least(self, "warmup", 0)
        if isinstance(self.over, str):
            if self.over not in ("ranks", "hosts"):
                refuse(self, "over", '"ranks", "hosts" or a number of ranks', 'over="hosts"')
        else:
            at_least(self, "over", 1)
        inner = resolve(self.inner)
        if isinstance(inner, Averaging) or inner.name in _DO_NOT_SUM:
            refuse(self, "inner", "a strategy that sums gradients, as the ranks of a team train together", _INNER)

    def team(self, comm: Communicator) -> int:
        if comm.world == 1 or self.over == "ranks":
            return 1
        size = comm.ranks_per_host if self.over == "hosts" else self.over
        if size is None:
            refuse(self, "over", "possible: the hosts do not all have as many consecutive ranks", "a number of ranks")
        assert isinstance(size, int), "validate() has seen it"
        if comm.world % size:
            refuse(self, "over", f"a number that divides the {comm.world} ranks", 'over="ranks"')
        return size

    def inner_policy(self, team: Communicator, device: torch.device) -> ExchangePolicy:
        """What the ranks of a team do."""
        return Apart() if team.world == 1 else resolve(self.inner).policy(team, device)


class AveragingPolicy(ExchangePolicy):
    """Ranks of a team follow `inner`. What teams do at the end of a step is `meet`, which a subclass has."""

    drift: Drift

    def __init__(self, inner: ExchangePolicy, every: int, warmup: int) -> None:
        self._inner = inner
        self._every = every
        self._warmup = warmup
        self.home, self.owns, self.keeps = inner.home, inner.owns, inner.keeps
        self.accumulate_at = inner.accumulate_at
        self.shard_over, self.bucket_bytes, self.merges = inner.shard_over, inner.bucket_bytes, inner.merges
        self.drift = Drift()
        self._alone = False  # whether there is only one team
        self._sums_over_all = False

    # ---------------------------------------------------------------- what a subclass has

    def meet(self, s: StepContext) -> Iterable[tuple[Bucket, Tensor]]:
        """Exchange with the other teams what is due at this step; gives what was written."""
        raise NotImplementedError

    def due(self, step: int) -> bool:
        """Whether teams have anything to do with each other at the end of this step."""
        return self.after_warmup(step) % self._every == 0

    def restart(self, buckets: Sequence[Bucket], samples: float | None) -> None:
        """All teams have the same values of these parameters now, after so many `samples` of this rank."""
        raise NotImplementedError

    def after_warmup(self, step: int) -> int:
        """How many steps there are after the warm-up, when this one is over."""
        return step + 1 - self._warmup

    # ---------------------------------------------------------------- the seam

    def join(self, teams: Teams, buckets: BucketList) -> None:
        self._teams = teams
        self._alone = teams.count == 1
        if self._alone and teams.everyone.rank == 0:
            log.warning("all ranks are in one team, so there is nothing to average: they train together all the time")
        self._inner.join(teams, buckets)
        self.restart(buckets.buckets, 0.0)

    def sums(self, step: int) -> bool:
        return step < self._warmup or self._inner.sums(step)

    def decide_together(self, step: int, teams: Teams) -> Communicator:
        self._sums_over_all = step < self._warmup and teams.count > 1
        return teams.everyone if self._sums_over_all else teams.team

    def exchanges(self, step: int) -> bool:
        return self._inner.exchanges(step)

    def shares_buffers(self, step: int) -> bool:
        return step < self._warmup or self.after_warmup(step) % self._every == 0

    def reduce(self, bucket: Bucket, source: Tensor, target: Tensor, op: str, own: Tensor | None = None) -> Handle:
        if not self._sums_over_all:
            return self._inner.reduce(bucket, source, target, op, own)
        if self.owns is Owns.EVERYTHING:
            return self._teams.everyone.all_reduce(source, target, op=op)
        inside = self._inner.reduce(bucket, source, target, op, own)
        return Afterwards([inside], lambda: self._teams.across.all_reduce(target, target, op=op).wait())

    def before_update(self, s: StepContext) -> None:
        self._inner.before_update(s)

    def after_update(self, s: StepContext) -> None:
        self.drift.squared = None
        if s.step + 1 == self._warmup:
            self.restart(s.buckets, s.samples)
        elif self._meets(s):
            written = list(self.meet(s))
            gather_shares(written)
            # One that `add_param_group` has given to another optimizer may still be exchanged with those of its first.
            s = replace(s, buckets=tuple(dict.fromkeys((*s.buckets, *(bucket for bucket, _ in written)))))
        self._inner.after_update(s)
        self._note_drift(s.step)

    def skipped(self, s: StepContext) -> None:
        if s.step + 1 == self._warmup or self._meets(s):
            self.before_update(s)
            self.after_update(s)
        else:
            self.drift.squared = None
            self._note_drift(s.step)

    def _note_drift(self, step: int) -> None:
        after = self.after_warmup(step)
        self.drift.since = after % self._every if after > 0 and not self._alone else 0

    def _meets(self, s: StepContext) -> bool:
        return not self._alone and bool(s.buckets) and self.after_warmup(s.step) > 0 and self.due(s.step)

    def loaded(self, buckets: BucketList) -> None:
        self._inner.loaded(buckets)
        self.restart(buckets.buckets, None)

    def refuses(self, optimizer: Optimizer) -> str | None:
        return self._inner.refuses(optimizer)
