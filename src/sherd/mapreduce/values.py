"""What `map_fn` may return, as a form and a list of leaves that can be added.

A value is a number, a tensor, a numpy array, or a dict, tuple or list of values. Its *form* is plain data and says how
to build the value again. Sums are kept wider than what is summed: floating-point tensors in float64, integers in
int64. Tensors are detached and moved to the CPU, contiguous, so that bits do not depend on where a result was computed.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sherd.errors import ConfigError

NUMBER = "number"
Form = Any
"""NUMBER, ("tensor" or "array", dtype, shape), or (dict's keys, tuple or list, and the forms inside)."""
Leaf = Any
"""A number or a tensor."""


def flatten(value: Any) -> tuple[Form, list[Leaf]]:
    """The form of a value, and its leaves."""
    leaves: list[Leaf] = []
    return _form(value, leaves), leaves


def build(form: Form, leaves: Iterator[Leaf], convert: Callable[[Leaf, Any], Any]) -> Any:
    """The value of this form. `convert` makes a leaf what it was before: it gets the leaf and its form."""
    if form == NUMBER:
        return convert(next(leaves), form)
    kind, *rest = form
    if kind == "dict":
        return {key: build(inner, leaves, convert) for key, inner in zip(*rest, strict=True)}
    if kind in ("tuple", "list"):
        inside = [build(inner, leaves, convert) for inner in rest[0]]
        return tuple(inside) if kind == "tuple" else inside
    converted = convert(next(leaves), form)
    return converted.numpy() if kind == "array" and isinstance(converted, Tensor) else converted


def settled(value: Any) -> Any:
    """The same value with its tensors detached, contiguous and on the CPU: what another rank would receive."""
    if isinstance(value, Tensor):
        return value.detach().cpu().contiguous()
    if type(value) is dict:
        return {key: settled(each) for key, each in value.items()}
    return type(value)(map(settled, value)) if type(value) in (tuple, list) else value


def _form(value: Any, leaves: list[Leaf]) -> Form:
    kind = type(value)
    if kind is dict:
        return ("dict", list(value), [_form(each, leaves) for each in value.values()])
    if kind is tuple or kind is list:
        return (kind.__name__, [_form(each, leaves) for each in value])
    if isinstance(value, Tensor):
        leaves.append(value.detach().cpu().contiguous())
        return ("tensor", value.dtype, tuple(value.shape))
    if kind.__module__ == "numpy" and getattr(value, "ndim", False):
        leaves.append(torch.from_numpy(value.copy()))
        return ("array", leaves[-1].dtype, tuple(value.shape))
    if kind.__module__ == "numpy" and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, numbers.Number):
        leaves.append(int(value) if isinstance(value, numbers.Integral) else value)
        return NUMBER
    raise ConfigError(
        f"map_fn returned {_named(value)}, which cannot be added or compared; return numbers, tensors, or dicts, "
        f"tuples and lists of those, or write reduce=fn with a function of your own"
    )


def _named(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def described(form: Form) -> str:
    """A form in words, for errors."""
    if form == NUMBER:
        return "a number"
    kind, *rest = form
    if kind == "dict":
        inside = ", ".join(f"{key!r}: {described(each)}" for key, each in zip(*rest, strict=True))
        return f"{{{inside}}}"
    if kind in ("tuple", "list"):
        return f"a {kind} of ({', '.join(map(described, rest[0]))})"
    return f"a {kind} of {str(rest[0]).removeprefix('torch.')}{list(rest[1])}"
