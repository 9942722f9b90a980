"""The loss over all ranks, reduced like its gradient, for optimizers that use the loss.

A line search compares losses. Ranks that each compared their own would take different steps.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from sherd.comm import Communicator
from sherd.engine.gradients.gradient import LossWeights
from sherd.errors import ConfigError


def loss_of_all(comm: Communicator, weights: LossWeights, loss: Any, optimizer: str) -> Any:
    """The loss over all ranks, on every rank, in the type of this rank's `loss`. Collective."""
    if not isinstance(loss, numbers.Real) and not (isinstance(loss, Tensor) and loss.numel() == 1):
        found = "None" if loss is None else f"a {type(loss).__name__}"
        if isinstance(loss, Tensor):
            found = f"a tensor of shape {tuple(loss.shape)}"
        raise ConfigError(
            f"rank {comm.number}: the closure of {optimizer}.step() returned {found} where the optimizer expects the "
            f"loss; end the closure with `return loss`, a number or a tensor of one element"
        )
    counts, weighed = weights.of_loss
    # Zero times NaN is NaN, and the loss of no tokens may well be NaN.
    value = loss.item() if isinstance(loss, Tensor) else float(loss)
    mine = [value * counts if counts else 0.0, counts if weighed else 0.0, float(weighed)]
    with comm.counters.agreeing():
        total, weight, weighing = comm.all_reduce(torch.tensor(mine, dtype=torch.float64)).wait().tolist()
    together = weights.loss(total, weight, weighing, comm.world)
    return torch.full_like(loss.detach(), together) if isinstance(loss, Tensor) else together
