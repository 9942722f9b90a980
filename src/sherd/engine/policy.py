"""What ranks exchange, and when: the seam between a strategy and the engine.

A strategy makes one policy per model. The engine asks it, in the order of a step:

    sums(step)           are gradients summed over the ranks in a backward? Then norm, clipping and skipping are global.
    exchanges(step)      do ranks meet at this step? Then they compare what must be the same, and share buffers.
    reduce(...)          how is one bucket of gradients summed?
    before_update(s)     what must have happened before parameters change?
    update(s)            the update itself: one step of the optimizer on what this rank owns
    after_update(s)      how do the new values reach the other ranks?

Where neither `sums` nor `exchanges` holds, nothing in a step is collective. `step` counts the real `step()` calls,
skipped ones too, so that ranks that decide by it meet at the same call.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sherd.comm import Communicator, Handle
from sherd.engine.buckets.bucket import Bucket
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


@dataclass(frozen=True)
class StepContext:
    """One update."""

    step: int
    """the number of real `step()` calls before it, skipped ones included"""
    comm: Communicator
    buckets: Sequence[Bucket]
    """what is updated: `bucket.values` has the parameters, `bucket.owned_sum` the gradient"""
    store: ParameterStore
    shard: Any
    """the optimizer on what this rank owns: `shard.step()`"""


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
    merges = True
    """whether small parameters may be updated together, as one flat tensor with a flat gradient; else the user's
    optimizer steps them one by one, from `p.grad`"""
    bucket_bytes: int | None = None
    """the size of a bucket, unless the user says; None: as fits the model"""

    def sums(self, step: int) -> bool:
        """Whether gradients are summed over the ranks."""
        return True

    def exchanges(self, step: int) -> bool:
        """Whether ranks meet at the end of this step."""
        return True

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
