"""What can be said to a distributed model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sherd.api.description import described
from sherd.api.members import engine_of
from sherd.api.training import training_of
from sherd.errors import ConfigError


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradient so that its 2-norm over all parameters is at most `max_norm`; the norm that it had.

    Collective. The same bits on every rank, and under every strategy with the same `accumulate_at`. NaN inside an
    accumulation window, where there is no gradient yet. `sherd.distribute(..., clip_norm=)` does it in every step.
    """
    engine = training_of(model).engine
    if not max_norm > 0:
        raise ConfigError(f"clip_grad_norm_ got max_norm={max_norm!r}; write a number above 0")
    return torch.tensor(engine.clip(float(max_norm)) if engine.window.complete else float("nan"))


def full_grad(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter over all ranks, whole: what `parameter.grad` gives too. Collective under ZeRO.

    What is done to it in place counts: it is written back before the step.
    """
    return parameter.grad


def weigh(model: nn.Module, weight: float) -> None:
    """Say how much the next backward counts, such as the number of its tokens.

    The gradient of a step is then the weighted mean over all ranks and all backwards, so that every token counts the
    same wherever it is. Call it before each backward, on every rank.
    """
    training_of(model).engine.weights.set(weight)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside are not the last before the step.

    Where gradients are added up on the rank, they are not exchanged until a backward outside. Where they are added up
    at their owners (the default of zero2 and zero3) every backward is exchanged all the same: there is no room for a
    local gradient. The gradient is the same but for its rounding; write the same `accumulate_at` for the same bits.
    """
    window = training_of(model).engine.window
    before, window.holding = window.holding, True
    try:
        yield
    finally:
        window.holding = before


@contextmanager
def full_parameters(model: nn.Module) -> Iterator[None]:
    """Parameters inside are whole and this rank's own, to look at or to edit. Collective.

    Every rank must make the same edits; they are compared, then written where the parameters live. A submodule of a
    distributed model will do, and copies less.
    """
    engine = engine_of(model)
    engine.torn.refuse("full_parameters")
    with engine.unchanged.editing(model, compare=True):
        yield


def describe(model: nn.Module) -> str:
    """Strategy, accumulation, shards, bytes by kind, buckets and transport of a distributed model. Collective.

    Before the first step the optimizer state is shown that this step will make, and a line says so.
    """
    return described(training_of(model))
