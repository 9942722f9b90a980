"""Optimizers and wrappers that `distribute` knows nothing of, on a distributed model.

Torch's own wrappers are refused when they are built. They would exchange gradients a second time, or put other
parameters in the place of those that are trained, and it would show much later, as a hang or as an error about
something else. They are told when they are about to begin, since they are often not the user's own: Accelerate and the
trainers that stand on it wrap every model. An FSDP that is imported after the last `distribute` is not told here. It is
found in the next backward, since it puts other parameters into the model.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from sherd.api.membership import find_engine
from sherd.api.training import find_training
from sherd.errors import ConfigError
from sherd.patches import foreign


def refuse_foreign() -> None:
    """Look at every `step()` of this process, and at what wrappers are put around, from now on."""
    foreign.install(_check_wrapped, _check_step)


def _check_step(optimizer: Optimizer) -> None:
    """Refuse an optimizer that was not passed, but steps parameters of a distributed model."""
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


def _check_wrapped(modules: Any, wrapper: str) -> None:
    for module in (modules,) if isinstance(modules, nn.Module) else modules or ():
        engine = next(filter(None, map(find_engine, (*module.modules(), *module.parameters()))), None)
        if engine is not None:
            raise ConfigError(
                f"rank {engine.comm.rank}: torch's {wrapper} was put around a model that sherd.distribute has made "
                f"ready already, so gradients would be exchanged twice; drop the wrapper and use `model` as it is. "
                f"Accelerate and the Hugging Face Trainer put it there by themselves: leave the model and the "
                f"optimizer out of accelerator.prepare(), and write the training loop in place of the Trainer"
            )
