"""Every rank trains alone: nothing is exchanged. What every strategy comes down to in a world of one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sherd.comm import Communicator
from sherd.engine.policy import ExchangePolicy, Merges, StepContext
from sherd.strategies.base import Strategy
from sherd.strategies.registry import register


class Apart(ExchangePolicy):
    """Gradients stay in `p.grad`, without hooks; nothing in a step is collective."""

    bucket_bytes = 256 << 10  # what is copied together before an update; a larger gradient is read where it is

    def sums(self, step: int) -> bool:
        return False

    def exchanges(self, step: int) -> bool:
        return False


class Alone(Apart):
    """The same, and no other rank ever has anything to do with the parameters."""

    merges = Merges.WHERE_IT_PAYS

    def before_update(self, s: StepContext) -> None:
        """Nobody else reads them. Those that are stepped together have to be in flat memory."""
        if s.shard is not None and s.shard.reads_sums:
            super().before_update(s)

    def after_update(self, s: StepContext) -> None:
        """Where the user's own optimizer steps, they were updated where the program has them."""
        if s.shard is not None and s.shard.reads_sums:
            super().after_update(s)


@register("local", elsewhere=("single", "none", "no communication"))
@dataclass(frozen=True, kw_only=True)
class Local(Strategy):
    """Ranks start from rank 0's values and do not communicate afterwards: to measure what communication costs."""

    def policy(self, comm: Communicator, device: torch.device) -> ExchangePolicy:
        return Alone()
