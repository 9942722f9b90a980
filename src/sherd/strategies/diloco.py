"""DiLoCo: teams train apart for many steps, then an outer optimizer with Nesterov momentum steps their difference.

Douillard et al. 2023, https://arxiv.org/abs/2311.08105; in fragments, overlapped with compute: Douillard et al. 2025,
https://arxiv.org/abs/2501.18512.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sherd.comm import Communicator
from sherd.config import at_least, one_of, positive, refuse
from sherd.engine.policy import ExchangePolicy
from sherd.strategies.averaging import Averaging
from sherd.strategies.outer import Outer
from sherd.strategies.outer_policy import OuterPolicy
from sherd.strategies.registry import register

_WIRE = {"fp32": None, "bf16": torch.bfloat16}


@register("diloco", elsewhere=("streaming diloco", "open diloco", "federated averaging", "fedopt", "torchft"))
@dataclass(frozen=True, kw_only=True)
class DiLoCo(Averaging):
    """Ranks, or hosts, or teams of ranks train apart; every so many steps an outer step makes them equal again.

    The outer state is sharded over all ranks: 8 bytes per parameter on all of them together.
    """

    outer_lr: float = 0.7
    """The learning rate of the outer optimizer."""

    outer_momentum: float = 0.9
    """Its Nesterov momentum; 0: none."""

    fragments: int = 1
    """The model is exchanged in so many parts, each at its own steps, spread over the `every` steps."""

    delay: int | None = None
    """Steps from the start of a fragment's exchange to its end, during which ranks compute. None: 0 for one fragment,
    which all ranks then wait for; for more, half of the steps between two fragments."""

    mix: float = 0.5
    """Where an exchange is delayed: how much of the new values a team continues from. The rest is what it has made
    meanwhile."""

    outer_dtype: str = "fp32"
    """What travels between teams: values in "fp32" (or the dtype of the parameters, where that is wider), or
    differences from the last exchange in "bf16": half the bytes, but each team then keeps whole values of that
    exchange, which takes 4 bytes per parameter of each team."""

    def validate(self) -> None:
        super().validate()
        positive(self, "outer_lr")
        at_least(self, "outer_momentum", 0)
        if self.outer_momentum >= 1:
            refuse(self, "outer_momentum", "less than 1", "outer_momentum=0.9")
        at_least(self, "fragments", 1)
        if self.fragments > self.every:
            refuse(self, "fragments", f"at most every={self.every}: one fragment starts at a step")
        at_least(self, "delay", 0)
        between = self.every // self.fragments
        if self.delay is not None and self.delay >= between:
            refuse(self, "delay", f"less than the {between} steps between two exchanges", f"delay={between - 1}")
        if not 0 < self.mix <= 1:
            refuse(self, "mix", "above 0 and at most 1, which takes the new values as they are", "mix=0.5")
        one_of(self, "outer_dtype", tuple(_WIRE))

    def policy(self, comm: Communicator, device: torch.device) -> ExchangePolicy:
        delay = self.delay
        if delay is None:
            delay = 0 if self.fragments == 1 else self.every // self.fragments // 2
        outer = Outer(self.outer_lr, self.outer_momentum, nesterov=True, wire=_WIRE[self.outer_dtype])
        inner = self.inner_policy(comm, device)
        return OuterPolicy(inner, self.every, self.warmup, outer, self.fragments, delay, self.mix)
