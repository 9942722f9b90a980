"""Synchronous data parallelism: everything is replicated on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sherd.comm import Communicator
from sherd.engine.policy import ExchangePolicy
from sherd.strategies.base import Strategy
from sherd.strategies.registry import register


@register("ddp", elsewhere=("dp", "data parallel", "DistributedDataParallel", "horovod", "no shard", "zero0"))
@dataclass(frozen=True, kw_only=True)
class DDP(Strategy):
    """Parameters, gradients and optimizer state whole on every rank; gradients are summed during backward."""

    def policy(self, comm: Communicator, device: torch.device) -> ExchangePolicy:
        return ExchangePolicy()
