"""ZeRO: optimizer state (stage 1), then gradients (2), then parameters (3) are sharded over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sherd.comm import Communicator
from sherd.config import refuse
from sherd.engine.choices import AccumulateAt, Choices, Gradients, Parameters
from sherd.strategies.base import Strategy
from sherd.strategies.registry import register


@dataclass(frozen=True, kw_only=True)
class ZeRO(Strategy):
    """Every rank updates the slices that it owns, with its part of the optimizer's state.

    On one host the parameters live once, in memory that its ranks share, at every stage: updates need no messages.
    """

    stage: int = 2
    """1: optimizer state is sharded; 2: gradients too; 3: parameters too."""

    share_host_memory: bool = True
    """Keep one copy of the parameters per host, where ranks can share memory. False: every rank has its own copy, and
    updated slices are gathered; at stage 3 every rank has its slices, and gathers parameters while they are used."""

    def validate(self) -> None:
        if self.stage not in (1, 2, 3):
            refuse(self, "stage", "1, 2 or 3", "stage=2")

    @property
    def name(self) -> str:  # type: ignore[override]
        """What a user writes to get this stage."""
        return f"zero{self.stage}"

    def choose(self, comm: Communicator, device: torch.device) -> Choices:
        shared = self.share_host_memory and comm.shares_memory and device.type == "cpu"
        gathered = self.stage == 3 and device.type == "cpu"
        private = Parameters.GATHERED if gathered else Parameters.PRIVATE
        return Choices(
            Parameters.HOST if shared else private,
            Gradients.WHOLE if self.stage == 1 else Gradients.SLICES,
            AccumulateAt.RANK if self.stage == 1 else AccumulateAt.OWNER,
        )


@register("zero1")
def _zero1() -> ZeRO:
    return ZeRO(stage=1)


@register("zero2")
def _zero2() -> ZeRO:
    return ZeRO(stage=2)


@register("zero3")
def _zero3() -> ZeRO:
    return ZeRO(stage=3)
