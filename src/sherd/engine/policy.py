"""What ranks exchange, and when: the seam between a strategy and the engine.

A strategy makes one policy per model. The engine asks it, in the order of a step:

    sums(step)           are gradients summed over the ranks in a backward? Then norm, clipping and skipping are global.
    exchanges(step)      do ranks meet at this step? Then they compare what must be the same, and share buffers.
    reduce(...)          how is one bucket of gradients summed?
    before_update(s)     what must have happened before parameters change?
    update(s)            the update itself: one step of the optimizer on what this rank owns
    after_update(s)      how do the new values reach the other ranks?
    skipped(s)           what happens in place of an update whose gradient is not finite?

Where neither `sums` nor `exchanges` holds, nothing in a step is collective. `step` counts the real `step()` calls,
skipped ones too, so that ranks that decide by it meet at the same call.

Ranks train in teams (see `Teams`): all of them in one, unless the strategy says otherwise. A step of the engine is one
of its team; what teams exchange with each other is the policy's own affair, in `after_update` and `skipped`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sherd.comm import Communicator, Handle
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.parameters.mesh import Teams
from sherd.engine.parameters.store import ParameterStore


class Home(enum.Enum):
    """Where parameters live."""

    PRIVATE = "private"
    """every rank has all of them"""
    GATHERED = "gathered"
    """every rank has its slices; buckets are gathered when they are used and released again"""
    GATHERED_BY_HOST = "gathered by host"
    """the same, but the ranks of a host gather a bucket together, once, into memory that they share"""
    HOST = "host"
    """the ranks of a host share one copy; owners update their slices in place"""


class Owns(enum.Enum):
    """What a rank updates, and keeps optimizer state for."""

    EVERYTHING = "everything"
    SLICE = "its slice"


class Keeps(enum.Enum):
    """What a rank keeps of the gradient."""

    WHOLE = "whole"
    """all of it: its own is added up there, and becomes the sum of what it owns"""
    SLICES = "slices"
    """only the sum of the slices that it owns"""


class AccumulateAt(enum.Enum):
    """Where the gradients of several backwards are added up."""

    RANK = "rank"
    """on the rank that computed them: ranks exchange once per step"""
    OWNER = "owner"
    """where the sum is kept: ranks exchange after every backward"""


class Merges(enum.Enum):
    """Whether small parameters are updated together, as one flat tensor with a flat gradient; else the user's optimizer
    steps them one by one, from `p.grad`."""

    ALWAYS = "always"
    WHERE_IT_PAYS = "where it pays"
    """gradients are not flat yet: copying them must cost less than is saved"""


@dataclass
class Drift:
    """How far the teams of a policy are from each other."""

    since: int = 0
    """real `step()` calls since they last exchanged parameters, skipped ones included"""
    squared: float | None = None
    """where teams exchanged in the last step: the squared distance of what this rank owns from the mean, before that"""
    partial: bool = False
    """whether an exchange only brings teams closer, so that they differ right after it too"""


@dataclass(frozen=True)
class StepContext:
    """One update."""

    step: int
    """the number of real `step()` calls before it, skipped ones included"""
    teams: Teams
    buckets: Sequence[Bucket]
    """what is updated: `bucket.values` has the parameters, `bucket.owned_sum` the gradient"""
    store: ParameterStore
    shard: Any
    """the optimizer on what this rank owns: `shard.step()`"""
    samples: float = 0.0
    """how many samples this rank has trained on so far; where losses are weighed, the sum of their weights"""

    @property
    def comm(self) -> Communicator:
        """The ranks that train together: this rank's team."""
        return self.teams.team

    @property
    def across(self) -> Communicator:
        """The ranks at this rank's place in every team."""
        return self.teams.across


class ExchangePolicy:
    """Gradients are summed in every backward, and every rank updates everything. Subclasses change that.

    A policy may keep a state of its own: there is one per model and rank.
    """

    home = Home.PRIVATE
    owns = Owns.EVERYTHING
    keeps = Keeps.WHOLE
    accumulate_at = AccumulateAt.RANK
    shard_over: int | None = None
    """how many ranks make a group that shards one copy of the parameters; None: all"""
    merges = Merges.ALWAYS
    bucket_bytes: int | None = None
    """the size of a bucket, unless the user says; None: as fits the model"""

    drift: Drift | None = None
    """kept by a policy whose teams differ between exchanges"""

    def join(self, teams: Teams, buckets: BucketList) -> None:
        """The engine is about to train these buckets. Collective."""

    def sums(self, step: int) -> bool:
        """Whether gradients are summed over the ranks."""
        return True

    def decide_together(self, step: int, teams: Teams) -> Communicator:
        """Where gradients are summed: the ranks that agree on what was used, and whether to skip the step."""
        return teams.team

    def exchanges(self, step: int) -> bool:
        """Whether the ranks of a team meet at the end of this step."""
        return True

    def shares_buffers(self, step: int) -> bool:
        """Whether the buffers of all teams become equal at this step, not only those of each."""
        return False

    def reduce(self, bucket: Bucket, source: Tensor, target: Tensor, op: str, own: Tensor | None = None) -> Handle:
        """Sum `source` over the ranks into `target`: what is kept of a bucket's sum, or of a piece of it.

        `own` is this rank's own part of a slice-wise sum, where that is not in `source`.
        """
        return bucket.comm.all_reduce(source, target, op=op)

    def before_update(self, s: StepContext) -> None:
        """The gradient is ready, and nothing has changed yet."""
        s.store.acquire(s.buckets)

    def update(self, s: StepContext, closure: Any = None) -> Any:
        """Step the optimizer; `closure` evaluates the loss again, for optimizers that search."""
        return s.shard.step() if closure is None else s.shard.step(closure)

    def after_update(self, s: StepContext) -> None:
        """This rank has updated what it owns; where it owns a slice, the store makes all slices visible."""
        s.store.publish(s.buckets)

    def skipped(self, s: StepContext) -> None:
        """The gradient of this step is not finite, so nothing was updated."""

    def agree_values(self, s: StepContext) -> None:
        """Overwrite what this rank owns with the consensus of all teams: their mean, unless a policy knows better.

        Collective. The store is acquired before, and published afterwards.
        """
        owned = [bucket.values.owned for bucket in s.buckets]
        for handle in [s.across.all_reduce(each, each, op="mean") for each in owned]:
            handle.wait()

    def loaded(self, buckets: BucketList) -> None:
        """Parameters were loaded: all ranks have rank 0's values of them. Collective."""

    def refuses(self, optimizer: Optimizer) -> str | None:
        """Why this optimizer cannot be used, and what to write instead; None if it can."""
        return None

    def bytes(self) -> dict[str, int]:
        """Bytes of what this policy keeps on this rank, by kind."""
        return {}
