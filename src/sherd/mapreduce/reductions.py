"""How values are merged: "sum", "mean", "max", or a function of the user's.

A reduction makes the value of one item a partial result, merges two neighbouring ones, and turns the last one into what
the caller gets. Partial results are plain data wherever values are, so that they can be sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from sherd.errors import ConfigError, nearest
from sherd.mapreduce.values import NUMBER, build, described, flatten, settled


class Reduction(Protocol):
    """What is done with values."""

    def start(self, value: Any) -> Any:
        """The partial result of one value."""

    def merge(self, left: Any, right: Any) -> Any:
        """That of two neighbours. It may change and return `left`."""

    def finish(self, partial: Any, items: int) -> Any:
        """The result over so many items."""


class Leafwise:
    """A reduction of values of one form, leaf by leaf."""

    def start(self, value: Any) -> Any:
        form, leaves = flatten(value)
        return form, [self.widened(leaf) for leaf in leaves]

    def merge(self, left: Any, right: Any) -> Any:
        (form, leaves), (other, more) = left, right
        if form != other:
            raise ConfigError(
                f"map_fn returned {described(form)} for one item and {described(other)} for a later one; return values "
                f"of one structure, dtype and shape"
            )
        return form, [self.combined(a, b) for a, b in zip(leaves, more, strict=True)]

    def finish(self, partial: Any, items: int) -> Any:
        form, leaves = partial
        return build(form, iter(leaves), lambda leaf, its: self.finished(leaf, its, items))

    def widened(self, leaf: Any) -> Any:
        return leaf

    def combined(self, a: Any, b: Any) -> Any:
        raise NotImplementedError

    def finished(self, leaf: Any, form: Any, items: int) -> Any:
        return leaf


class Sum(Leafwise):
    def widened(self, leaf: Any) -> Any:
        return leaf.to(_sum_dtype(leaf.dtype), copy=True) if isinstance(leaf, Tensor) else leaf

    def combined(self, a: Any, b: Any) -> Any:
        return a.add_(b) if isinstance(a, Tensor) else a + b

    def finished(self, leaf: Any, form: Any, items: int) -> Any:
        return leaf if form == NUMBER or not _is_inexact(form[1]) else leaf.to(form[1])


class Mean(Sum):
    """Over items: every item counts the same, whatever its size."""

    def finished(self, leaf: Any, form: Any, items: int) -> Any:
        if form != NUMBER and not _is_inexact(form[1]):
            leaf = leaf.double()
        return super().finished(leaf / items, form, items)


class Max(Leafwise):
    """Element by element. NaN is larger than anything, as in torch."""

    def combined(self, a: Any, b: Any) -> Any:
        if isinstance(a, Tensor):
            return torch.maximum(a, b)
        return b if b > a or b != b else a  # noqa: PLR0124 - not itself: NaN


class Own:
    """A function of the user's that merges two neighbouring values."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._function = function

    def start(self, value: Any) -> Any:
        return settled(value)

    def merge(self, left: Any, right: Any) -> Any:
        return settled(self._function(left, right))

    def finish(self, partial: Any, items: int) -> Any:
        return partial


_NAMED: dict[str, type[Leafwise]] = {"sum": Sum, "mean": Mean, "max": Max}


def reduction_of(reduce: Any) -> Reduction:
    """The reduction that a caller asked for."""
    if isinstance(reduce, str):
        if reduce not in _NAMED:
            raise ConfigError(f"got reduce={reduce!r}; {nearest(reduce, _NAMED)}, or a function of two values")
        return _NAMED[reduce]()
    if not callable(reduce):
        names = ", ".join(map(repr, _NAMED))
        raise ConfigError(f"got reduce={reduce!r}; write {names}, or a function of two values such as operator.mul")
    return Own(reduce)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64
