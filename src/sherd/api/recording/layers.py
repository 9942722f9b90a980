"""On request (SHERD_LAYERS=1): gradient, update and value of each layer, and a warning when one vanishes or explodes.

A *layer* is a module with its own parameters. Each rank records sums of squares over the elements that it owns, so that
the sum over the ranks is the layer's under every strategy. For warnings, the owner of a layer's first element compares
the root mean square over what it owns, which needs no communication.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sherd import observe
from sherd.engine.buckets.bucket import Bucket
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.engine import Engine
from sherd.engine.gradients.gradient import Gradient
from sherd.layout.placement import BLOCK
from sherd.layout.slicing import Segment

log = logging.getLogger("sherd")

ROOT = "(model)"
"""The layer name for parameters that belong to the model itself."""
HISTORY = 10
"""Steps before a layer has enough history to be compared with."""
VANISHED, FALLEN, NOTHING = 1e-4, 1e-2, 1e-6
"""A gradient vanishes below 1e-4 of the median layer's and 1e-2 of its own history, or if it was always below 1e-6 of
the median layer's."""
EXPLODED = 100.0
"""It explodes above 100 times its own history, unless it is below the median layer's."""
STILL, WILD, JUMP = 1e-8, 1.0, 10.0
"""An update vanishes below 1e-8 of the layer's values, which float32 rounds away. It explodes if it is larger than the
values and more than 10 times its own history."""
KEEP = 0.9
"""The weight of the history in its moving average."""


@dataclass
class Layer:
    """One rank's part of a layer in one step."""

    numel: int = 0
    norm_squared: float = 0.0
    update_squared: float = 0.0
    value_squared: float = 0.0
    leads: bool = False
    """whether this rank owns its first element"""

    @property
    def gradient(self) -> float:
        """Root mean square of the gradient."""
        return math.sqrt(self.norm_squared / self.numel) if self.norm_squared >= 0 else math.nan

    @property
    def ratio(self) -> float:
        """Update over value."""
        return math.sqrt(self.update_squared / self.value_squared) if self.value_squared else math.inf

    def fields(self) -> dict[str, float]:
        """The fields of a `step` event."""
        return {name: getattr(self, name) for name in ("norm_squared", "update_squared", "value_squared")}


class LayerMeter:
    """Measures the layers that one optimizer trains, at each of its steps."""

    def __init__(self, engine: Engine, gradient: Gradient) -> None:
        self._engine = engine
        self._gradient = gradient
        self._watch = LayerWatch()
        self._values: dict[tuple[TrackedParameter, int], Tensor] = {}

    def before(self) -> None:
        """Before a `step()`: keep the values, if it is a real one."""
        if self._gradient.window.last:
            self._values = {(m, segment.region.start): value.clone() for m, segment, value in self._own()}

    def after(self, step: int, rates: list[float | None], skipped: bool) -> dict[str, dict[str, float]]:
        """After a real step: this rank's part of each layer. Warns where something is wrong."""
        layers = self._measure()
        self._values = {}
        if not skipped:
            for name, wrong in self._watch.look(layers, moving=any(rates)):
                text = f"step {step}: layer {name!r} {wrong}"
                observe.emit("warning", step, text=text, layer=name)
                log.warning("%s", text)
        return {name: layer.fields() for name, layer in layers.items()}

    def _measure(self) -> dict[str, Layer]:
        squares = dict(zip(self._buckets, self._gradient.own_squares(self._buckets), strict=True))
        layers: dict[str, Layer] = {}
        first: dict[str, TrackedParameter] = {}
        for member in self._engine.buckets.parameters:
            first.setdefault(_layer_of(member.name), member)
        for member, segment, value in self._own():
            name = _layer_of(member.name)
            layer = layers.setdefault(name, Layer())
            block = segment.offset // BLOCK
            before = self._values.get((member, segment.region.start))
            layer.numel += segment.numel
            layer.norm_squared += float(squares[member.bucket][block : block + segment.blocks].sum())
            layer.value_squared += _squared(value)
            layer.update_squared += 0.0 if before is None else _squared(value.double() - before.double())
            layer.leads |= member is first[name] and segment.region.start == 0
        return layers

    @property
    def _buckets(self) -> tuple[Bucket, ...]:
        return self._engine.trained.of(self._gradient)

    def _own(self) -> Iterator[tuple[TrackedParameter, Segment, Tensor]]:
        """The segments of the parameters that this rank owns."""
        engine = self._engine
        for bucket in self._buckets:
            for member, segment in bucket.segments(bucket.comm.rank):
                # Even if it updates all of them, it measures only its slices.
                flat, start = (
                    (bucket.values.owned, segment.offset)
                    if engine.store.updates_slices
                    else (member.flattened, segment.region.start)
                )
                yield member, segment, flat[start : start + segment.numel]


@dataclass
class _Past:
    gradient: float = 0.0
    ratio: float = 0.0
    steps: int = 0

    def add(self, gradient: float, ratio: float) -> None:
        keep = KEEP if self.steps else 0.0
        self.gradient = keep * self.gradient + (1 - keep) * gradient
        self.ratio = keep * self.ratio + (1 - keep) * ratio
        self.steps += 1


@dataclass
class LayerWatch:
    """Finds layers whose gradient or update vanishes or explodes. Reports each once, until it has recovered."""

    _pasts: dict[str, _Past] = field(default_factory=dict)
    _told: set[tuple[str, str]] = field(default_factory=set)

    def look(self, layers: dict[str, Layer], moving: bool) -> list[tuple[str, str]]:
        """Layers and what is wrong with them; `moving`: some learning rate is above 0."""
        found = []
        finite = [layer.gradient for layer in layers.values() if math.isfinite(layer.gradient)]
        median = statistics.median(finite) if finite else 0.0
        for name, layer in layers.items():
            gradient, ratio = layer.gradient, layer.ratio
            if not layer.leads or not math.isfinite(gradient):
                continue
            past = self._pasts.setdefault(name, _Past())
            wrong = _wrong(past, gradient, ratio, median, moving) if past.steps >= HISTORY else {}
            for kind, text in wrong.items():
                if (name, kind) not in self._told:
                    found.append((name, text))
            self._told = {each for each in self._told if each[0] != name} | {(name, kind) for kind in wrong}
            past.add(gradient, ratio if math.isfinite(ratio) else 0.0)
        return found


def _wrong(past: _Past, gradient: float, ratio: float, median: float, moving: bool) -> dict[str, str]:
    """What is wrong with a layer: messages by kind."""
    found = {}
    beside = f"root mean square {gradient:.2g}, {past.gradient:.2g} before, {median:.2g} in the median layer"
    fallen = gradient < FALLEN * past.gradient and gradient < VANISHED * median
    if fallen or (gradient < NOTHING * median and past.gradient < NOTHING * median):
        found["gradient vanishes"] = f"has a vanishing gradient: {beside}"
    if gradient > EXPLODED * past.gradient and gradient >= median:
        found["gradient explodes"] = f"has an exploding gradient: {beside}"
    beside = f"{ratio:.2g} of its values, {past.ratio:.2g} before"
    if moving and gradient > 0 and ratio < STILL:
        found["update vanishes"] = f"hardly moves: an update is {beside}"
    if ratio > WILD and ratio > JUMP * past.ratio:
        found["update explodes"] = f"is overwritten: an update is {beside}"
    return found


def _layer_of(parameter: str) -> str:
    return parameter.rpartition(".")[0] or ROOT


def _squared(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
