"""Casts the floating-point tensors of what is passed to a module or returned by it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""What is cast on entry. Integers, bools and complex numbers are not, nor 8-bit floats: they need a scale."""
HALVES = frozenset({torch.float16, torch.bfloat16})
"""What is cast when a call from outside returns; a model that returns fp64 does so on purpose."""
COMPUTED = HALVES | {torch.float32}
"""What is cast when a module that is kept in fp32 returns."""
ATOMS = frozenset({type(None), bool, int, float, str})


def cast(value: Any, dtype: torch.dtype, among: frozenset[torch.dtype], done: dict[Tensor, Tensor]) -> Any:
    """`value` with its tensors of a dtype in `among` cast; the same object if there are none.

    Looks into tuples, named tuples, lists, mappings and dataclasses, and makes copies of those in which something is
    cast. `done` has what was cast already: a tensor that is passed twice stays one tensor.
    """
    if isinstance(value, Tensor):
        if value.dtype is dtype or value.dtype not in among:
            return value
        if value not in done:
            done[value] = value.to(dtype)
        return done[value]
    if type(value) in ATOMS:
        return value
    if isinstance(value, tuple | list):
        items = [cast(item, dtype, among, done) for item in value]
        return value if _same(items, value) else _sequence(value, items)
    if isinstance(value, Mapping):
        found = {key: cast(item, dtype, among, done) for key, item in value.items()}
        return value if _same(found.values(), value.values()) else _mapping(value, found)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, dtype, among, done)
    return value


def first_float(args: tuple[Any, ...], options: dict[str, Any]) -> torch.dtype | None:
    """The dtype of the first floating-point tensor in there, if any."""
    if args and isinstance(args[0], Tensor) and args[0].dtype in FLOATS:
        return args[0].dtype
    return next((tensor.dtype for tensor in _tensors((args, options)) if tensor.dtype in FLOATS), None)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name, None))


def _same(these: Any, those: Any) -> bool:
    return all(this is that for this, that in zip(these, those, strict=True))


def _sequence(value: Any, items: list[Any]) -> Any:
    kind: Any = type(value)
    if kind is tuple or kind is list:
        return kind(items)
    if isinstance(value, list):
        value = copy.copy(value)
        value[:] = items
        return value
    return kind._make(items) if hasattr(kind, "_make") else kind(items)


def _mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    if not isinstance(value, MutableMapping):
        kind: Any = type(value)
        return kind(items)
    result = copy.copy(value)
    for key, item in items.items():
        if item is not value[key]:
            result[key] = item
    return result


def _dataclass(value: Any, dtype: torch.dtype, among: frozenset[torch.dtype], done: dict[Tensor, Tensor]) -> Any:
    result = value
    for field in dataclasses.fields(value):
        item = getattr(value, field.name, None)
        new = cast(item, dtype, among, done)
        if new is not item:
            result = copy.copy(value) if result is value else result
            object.__setattr__(result, field.name, new)  # it may be frozen
    return result
