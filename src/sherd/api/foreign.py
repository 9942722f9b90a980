"""Optimizers that were not passed to `distribute`, but step parameters of a distributed model."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sherd.api.membership import find_engine
from sherd.api.training import find_training
from sherd.errors import ConfigError


@functools.cache
def refuse_foreign_steps() -> None:
    """Look at every `step()` of this process from now on. Those of distributed optimizers cost nothing."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, *_: Any) -> None:
    if find_training(optimizer) is not None:
        return
    engines = (find_engine(parameter) for group in optimizer.param_groups for parameter in group["params"])
    engine = next((engine for engine in engines if engine is not None), None)
    if engine is None:
        return
    why = None
    if engine.store.updates_slices:
        why = "every rank would step all parameters, with state for all of them, where each is to step its own part"
    elif engine.window.length > 1:
        why = "it knows nothing of accumulate=, and would find no gradient where a window is not complete"
    if why is not None:
        kind = type(optimizer).__name__
        raise ConfigError(
            f"rank {engine.comm.rank}: this {kind} steps a distributed model and was not passed to sherd.distribute: "
            f"{why}; write model, optimizer = sherd.distribute(model, optimizer) (a model has one optimizer, with a "
            f"group for each kind of parameter)"
        )
