"""The metrics of an evaluation: functions of a batch, and objects with a state, such as those of torchmetrics.

Each of them is a reduction whose partial results are merged in the order of the chunks.
"""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from sherd.errors import ConfigError
from sherd.mapreduce.values import settled

OBJECT = ("update", "compute", "reset")
"""The methods of an object with a state."""


class Metric(Protocol):
    """One metric: collects a chunk on this rank, then merges what ranks have collected."""

    def begin(self) -> None:
        """A chunk begins."""

    def update(self, output: Any, target: Any, samples: int) -> None:
        """Add a batch."""

    def collected(self) -> Any:
        """The partial result of the chunk, as plain data."""

    def start(self, value: Any) -> Any: ...

    def merge(self, left: Any, right: Any) -> Any: ...

    def finish(self, partial: Any, items: int) -> Any: ...


class FunctionMetric:
    """A function of output and target, averaged over samples. A partial result is the weighted sum and the weight."""

    def __init__(self, name: str, function: Any) -> None:
        self._name, self._function = name, function

    def begin(self) -> None:
        self._sum: Any = None

    def update(self, output: Any, target: Any, samples: int) -> None:
        weighted = self._weighted(self._function(output, target), samples)
        self._sum = weighted if self._sum is None else self.merge(self._sum, weighted)

    def collected(self) -> Any:
        return self._sum

    def start(self, value: Any) -> Any:
        return value

    def merge(self, left: Any, right: Any) -> Any:
        (a, weight), (b, more) = left, right
        if a.shape != b.shape:
            raise ConfigError(
                f"metric {self._name!r} has shape {list(a.shape)} for one batch and {list(b.shape)} for a later one"
            )
        return a + b, weight + more

    def finish(self, partial: Any, items: int) -> Any:
        total, weight = partial
        found = total / weight if weight else torch.full_like(total, math.nan)
        return found if found.dim() else found.item()

    def _weighted(self, value: Any, samples: int) -> tuple[Tensor, float]:
        """A value of this batch, times its weight, and its weight."""
        if type(value) is tuple and len(value) == 2:
            value, weight = value[0], float(value[1])
            if not 0 <= weight < math.inf:
                raise ConfigError(f"metric {self._name!r} returned the weight {weight}; write a count")
            return (self._number(value) * weight if weight else torch.zeros_like(self._number(value))), weight
        found = self._number(value)
        if found.dim() == 0:
            return found * samples, float(samples)
        if tuple(found.shape) == (samples,):
            return found.sum(), float(samples)
        raise ConfigError(
            f"metric {self._name!r} returned a tensor of shape {list(found.shape)} for a batch of {samples} samples; "
            f"return their mean, one value for each of them, or a pair (mean, weight)"
        )

    def _number(self, value: Any) -> Tensor:
        if isinstance(value, numbers.Real) or (isinstance(value, Tensor) and not value.is_complex()):
            return torch.as_tensor(value).detach().cpu().double()
        if type(value).__module__ == "numpy":
            return torch.as_tensor(value).double()
        raise ConfigError(f"metric {self._name!r} returned a {type(value).__name__}; return a number or a tensor")


class ObjectMetric:
    """An object of torchmetrics, or one like it: `_defaults` names its states, `_reductions` says how they merge.

    It works on a copy: the user's object is left alone. A partial result is (number of updates, states); a state is
    merged as torchmetrics merges those of several processes.
    """

    def __init__(self, name: str, metric: Any) -> None:
        self._name = name
        self._metric = copy.deepcopy(metric)
        # It must not gather over the ranks by itself: that would count everything several times.
        for switch in ("sync_on_compute", "_to_sync", "dist_sync_on_step"):
            if hasattr(self._metric, switch):
                setattr(self._metric, switch, False)
        self._reductions: dict[str, Any] = dict(metric._reductions)

    def begin(self) -> None:
        self._metric.reset()
        self._updates = 0

    def update(self, output: Any, target: Any, samples: int) -> None:
        self._metric.update(output, target)
        self._updates += 1

    def collected(self) -> Any:
        # Cloned: `reset` may clear a list in place.
        states = {name: copy.deepcopy(settled(getattr(self._metric, name))) for name in self._reductions}
        return self._updates, {name: self._sent(name, state) for name, state in states.items()}

    def start(self, value: Any) -> Any:
        return value

    def merge(self, left: Any, right: Any) -> Any:
        (updates, states), (more, others) = left, right
        merged = {name: self._merged(name, states[name], others[name]) for name in self._reductions}
        return updates + more, merged

    def finish(self, partial: Any, items: int) -> Any:
        updates, states = partial
        self._metric.reset()
        for name, state in states.items():
            device = getattr(getattr(self._metric, name), "device", None)
            setattr(self._metric, name, _on(self._whole(name, state, updates), device))
        if hasattr(self._metric, "_update_count"):
            self._metric._update_count = updates
        return settled(self._metric.compute())

    def _sent(self, name: str, state: Any) -> Any:
        how = _how(self._reductions[name])
        if how == "mean":  # as if every update had been made in one process
            return state * self._updates
        return state if how in ("sum", "max", "min") or isinstance(state, list) else [state]

    def _merged(self, name: str, a: Any, b: Any) -> Any:
        how = _how(self._reductions[name])
        if how in ("max", "min"):
            return torch.maximum(a, b) if how == "max" else torch.minimum(a, b)
        return a + b  # sums; and lists, which get longer

    def _whole(self, name: str, state: Any, updates: int) -> Any:
        """A state as `compute` expects it."""
        reduction, was_list = self._reductions[name], isinstance(getattr(self._metric, name), list)
        how = _how(reduction)
        if how in ("sum", "max", "min"):
            return state
        if how == "mean":
            return state / max(updates, 1)
        if was_list:
            return state
        if how == "cat":
            return torch.cat(state)
        if len(state) == 1:
            return state[0]
        stacked = torch.stack(state)
        return stacked if reduction is None else reduction(stacked)


def _how(reduction: Any) -> str:
    """By its name, as torchmetrics need not be installed: `dim_zero_sum` and the like."""
    return str(getattr(reduction, "__name__", "")).removeprefix("dim_zero_")


def _on(state: Any, device: Any) -> Any:
    return state.to(device) if device is not None and isinstance(state, Tensor) else state


def metrics_of(metrics: Any) -> dict[str, Metric]:
    """The metrics that a caller asked for, by name."""
    if not isinstance(metrics, Mapping) and not hasattr(metrics, "items"):
        found = f"a {type(metrics).__name__}"
        raise ConfigError(f'got {found} as metrics; write a dict of names, such as {{"loss": F.cross_entropy}}')
    named = dict(metrics.items())
    if not named or not all(isinstance(name, str) for name in named):
        raise ConfigError(f'got metrics named {list(named)}; write at least one, such as {{"loss": F.cross_entropy}}')
    return {name: _metric(name, metric) for name, metric in named.items()}


def _metric(name: str, metric: Any) -> Metric:
    if all(hasattr(metric, method) for method in OBJECT):
        if getattr(metric, "_defaults", None) and hasattr(metric, "_reductions"):
            return ObjectMetric(name, metric)
        raise ConfigError(
            f"metric {name!r}, a {type(metric).__name__}, has no states of its own that could be merged over ranks "
            f"(_defaults and _reductions, as torchmetrics calls them); pass the metrics it is made of"
        )
    if not callable(metric):
        raise ConfigError(
            f"metric {name!r} is a {type(metric).__name__}; write a function of output and target, or a metric object"
        )
    return FunctionMetric(name, metric)
