"""Means and sums over ranks and over calls of `sherd.log`. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LogEntry:
    """One call of `sherd.log` on one rank."""

    figures: Mapping[str, float]
    n: float


def weighted_mean(values: Sequence[float], weights: Sequence[float | None]) -> float:
    """The weighted mean. If a weight is unknown, or all are zero, every value counts the same."""
    known = [weight for weight in weights if weight is not None]
    if len(known) < len(values) or not sum(known) > 0:
        known = [1] * len(values)
    # A weight of zero removes its value, even a NaN: that rank had no samples.
    total = math.fsum(known)
    parts = [value * (weight / total) for value, weight in zip(values, known, strict=True) if weight]
    return sum(parts) if any(not math.isfinite(part) for part in parts) else math.fsum(parts)


def averaged(logs: Iterable[LogEntry]) -> dict[str, float]:
    """Every figure's weighted mean over calls and ranks, without tokens, which `tokens_of` sums."""
    found: dict[str, tuple[list[float], list[float | None]]] = {}
    for entry in logs:
        for name, value in entry.figures.items():
            if name == "tokens":
                continue
            values, weights = found.setdefault(name, ([], []))
            values.append(value)
            weights.append(entry.n)
    return {name: weighted_mean(values, weights) for name, (values, weights) in found.items()}


def tokens_of(logs: Iterable[LogEntry]) -> float | None:
    """The sum over calls and ranks, or None if none logged them."""
    found: float | None = total(entry.figures.get("tokens") for entry in logs)
    return found


def sum_by_key(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sums by name, in the order of first appearance."""
    total: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total


def total(parts: Iterable[Any]) -> Any:
    """The sum of the known parts, or None if there are none."""
    known = [part for part in parts if part is not None]
    return sum(known) if known else None
