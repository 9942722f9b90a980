"""The gradients that an optimizer is probed with.

A rule that looks at a whole tensor is often conditional: project where gradient and weight are orthogonal, clip where
the norm is large, restart where the gradient has turned. Random gradients meet few of these conditions, so each is
created on purpose. And a condition must not hold for both a tensor and its parts: the norm, angle or sign of the whole
differs from that of its *first part*, which ends at the first cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sherd.layout.placement import BLOCK

CUTS = (BLOCK, 3 * BLOCK)
"""Between blocks, where layouts cut: fused kernels round the last elements, those that do not fill a vector,
differently from the rest, so that a cut elsewhere changes bits."""
_TINY, _HUGE = 1e-6, 1e4
"""Sizes of elements: the square of one is below every epsilon, the other is above every norm bound, and fits fp16."""


class Draw(NamedTuple):
    """What a gradient may depend on. All tensors are on the CPU in fp64 (or complex128), and of one shape."""

    weight: Tensor
    previous: Tensor
    """The gradient of the previous step; zeros in the first."""
    generator: torch.Generator

    def noise(self, scale: float = 1.0) -> Tensor:
        return torch.randn(self.weight.shape, generator=self.generator, dtype=self.weight.dtype).mul_(scale)


Rule = Callable[[Draw], Tensor]


class Regime(NamedTuple):
    """One step of a run."""

    gradient: Rule
    weight: Rule | None = None
    """Makes new weights before the step; without it, the step starts from the previous result."""


def _random(scale: float = 1.0) -> Rule:
    return lambda draw: draw.noise(scale)


def _constant(value: float) -> Rule:
    return lambda draw: torch.full_like(draw.weight, value)


def _away_from_zero(draw: Draw) -> Tensor:
    noise = draw.noise()
    return noise + 0.5 * noise.sgn()


def _orthogonal(draw: Draw) -> Tensor:
    """Orthogonal to the weight in every view: by rows, columns and channels, and as a whole, like the gradients of a
    layer that a normalisation makes scale-invariant."""
    products = draw.noise()
    for dim in range(products.dim()):
        products -= products.mean(dim, keepdim=True)
    return products / draw.weight


def _orthogonal_in_all(draw: Draw) -> Tensor:
    """Orthogonal to the weight as a whole, but not by rows or columns."""
    noise, weight = draw.noise(), draw.weight
    return noise - weight * ((noise * weight.conj()).sum() / weight.abs().square().sum())


def _parallel(factor: float) -> Rule:
    return lambda draw: draw.weight * factor


def _repeated(factor: float) -> Rule:
    return lambda draw: draw.previous * factor


def _first(first: Rule, rest: Rule) -> Rule:
    """`first` in the first part, `rest` elsewhere."""

    def draw_both(draw: Draw) -> Tensor:
        value = rest(draw).flatten()
        value[: CUTS[0]] = first(draw).flatten()[: CUTS[0]]
        return value.reshape(draw.weight.shape)

    return draw_both


def _first_row(draw: Draw) -> Tensor:
    """Like the gradient of an embedding: most rows were not looked up."""
    noise = draw.noise()
    if noise.dim():
        noise[1:] = 0
    return noise


RANDOM = (Regime(_random(), _random()), Regime(_random(100.0)), Regime(_random(0.01), _random(_TINY)))
"""The first run: gradients of several sizes, which reveal most rules. With tiny weights no update is rounded away."""

_ANGLES = (
    Regime(_orthogonal, _away_from_zero),
    Regime(_orthogonal),
    Regime(_orthogonal_in_all),
    Regime(_orthogonal_in_all),
    Regime(_parallel(1.0)),
    Regime(_first(_random(0.1), _parallel(1.0))),
    Regime(_first(_random(0.1), _parallel(-1.0))),
)
_SIGNS = (
    Regime(_random(), _random()),
    *[Regime(_repeated(1.0))] * 3,
    Regime(_repeated(-1.0)),
    Regime(_first(_repeated(-1.0), _repeated(1.0))),
    Regime(_first(_repeated(1.0), _repeated(-1.0))),
)
_SIZES = (  # gradients grow from step to step: where squares are averaged, a large one hides later small ones
    Regime(_constant(0.0), _constant(0.0)),
    Regime(_random(_TINY)),
    Regime(_first(_constant(0.0), _random(_TINY)), _random(_TINY)),
    Regime(_first(_random(_TINY), _constant(0.0))),
    Regime(_first_row, _random(0.01)),
    Regime(_constant(0.1), _constant(0.1)),
    Regime(_first(_constant(0.0), _random()), _first(_constant(0.0), _random())),
    Regime(_first(_random(), _constant(0.0)), _first(_random(), _constant(0.0))),
    Regime(_first(_random(_TINY), _random()), _first(_random(), _random(_TINY))),
    Regime(_random(), _random(_HUGE)),
    Regime(_first(_random(), _random(_HUGE)), _random()),
    Regime(_first(_random(_HUGE), _random()), _random()),
    Regime(_random(_HUGE), _random()),
)
SPECIAL = ((*_ANGLES, *_SIGNS), _SIZES)
"""The runs after it. Each has many steps, since some rules apply only in every fifth or tenth step."""

MERGED = (*RANDOM, *[Regime(_random(), _random(_TINY))] * 4, *_SIZES[-2:])
"""The run that shows whether tensors may be merged: whether the last elements of one, which do not fill a vector, are
rounded as those in the middle of another. Any gradients would do, in many elements; with tiny weights it shows best."""
