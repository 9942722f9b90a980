"""Functions for a distributed model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sherd.api.description import described
from sherd.api.members import engine_of
from sherd.api.training import training_of
from sherd.engine.consensus import consensus as engine_consensus
from sherd.engine.gradients.sharded_gradient import ShardedGradient
from sherd.engine.parameters.masters import with_masters
from sherd.errors import ConfigError


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradient so that its 2-norm over all parameters is at most `max_norm`; returns its norm before that.

    Collective. Gives the same bits on every rank, and under every strategy with the same `accumulate_at`. Returns NaN
    inside an accumulation window, where there is no gradient yet. `sherd.distribute(..., clip_norm=)` clips every step.
    """
    engine = training_of(model).engine
    if not max_norm > 0:
        raise ConfigError(f"clip_grad_norm_ got max_norm={max_norm!r}; write a number above 0")
    whole = any(gradient.window.whole for gradient in engine.gradients)
    return torch.tensor(engine.clip(float(max_norm)) if whole else float("nan"))


def full_grad(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter over all ranks, as a plain tensor with all its elements. Collective under ZeRO.

    In-place changes to it count: they are written back before the step.
    """
    gradient = parameter.grad
    return gradient.whole if isinstance(gradient, ShardedGradient) else gradient


def weigh(model: nn.Module, weight: float) -> None:
    """Set the weight of the next backward, such as its number of tokens.

    The gradient of a step is then the weighted mean over all ranks and backwards, so that every token counts the same,
    wherever it is. Call it before each backward, on every rank.
    """
    engine = training_of(model).engine
    if not weight >= 0 or weight == float("inf"):
        raise ConfigError(f"sherd.weigh got {weight!r}; a weight is a finite number, such as a count of tokens")
    engine.trained.weigh(float(weight))


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Mark the backwards inside as not the last before the step.

    Where gradients accumulate on the rank, they are not exchanged until a backward outside. Where they accumulate at
    their owners (the default of zero2 and zero3), every backward is exchanged anyway: there is no memory for a local
    gradient. The two differ only in rounding; write the same `accumulate_at` for the same bits.
    """
    trained = training_of(model).engine.trained
    before, trained.holding = trained.holding, True
    try:
        yield
    finally:
        trained.holding = before


@contextmanager
def full_parameters(model: nn.Module, *, masters: bool = False) -> Iterator[None]:
    """Inside, parameters are whole and private to this rank, to read or to edit. Collective.

    Every rank must make the same edits; they are compared, then written back to where the parameters live. `model` may
    be a submodule of a distributed model, which copies less.

    With `masters`, 16-bit parameters are the fp32 values that the optimizer steps, all their bits: to save them, or to
    edit them. The model computes in fp32 meanwhile.
    """
    engine = engine_of(model)
    engine.torn.refuse("full_parameters")
    engine.refuse_at_consensus("full_parameters")
    chosen = with_masters(engine.inventory.of_module(model)) if masters else ()
    with engine.unchanged.editing(model, compare=True, masters=chosen):
        yield


@contextmanager
def consensus(model: nn.Module) -> Iterator[None]:
    """Inside, all ranks have the same parameters and buffers: the mean over all ranks, to evaluate or to save.

    Under strategies that average parameters now and then, ranks differ between exchanges; at the end each rank has its
    own values again. Under all others it changes nothing. Collective.
    """
    with engine_consensus(training_of(model).engine):
        yield


def describe(model: nn.Module) -> str:
    """Strategy, accumulation, transport, shards, buckets, calls and bytes by kind of a distributed model. Collective.

    Before the first step, it shows the optimizer state that this step will create, and says so.
    """
    return described(training_of(model))
