"""What the layout knows of one parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sherd.engine.placement import Placement, Split
from sherd.errors import ConfigError, nearest

ITEMSIZE = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    "complex128": 16,
}
"""Bytes per element, by torch's name of the dtype without `torch.`."""


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name that entries use."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(tensor: Tensor) -> str:
    """The name that entries use for the dtype of `tensor`."""
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Entry:
    """One parameter: its name, its global shape, its dtype by torch's name (`"float32"`) and its placement."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    placement: Placement = Placement.FLAT

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "placement", Placement.parse(self.placement))
        if any(size < 0 for size in self.shape):
            raise ConfigError(f"parameter {self.name!r} has shape {self.shape}; a size cannot be negative")
        if self.dtype not in ITEMSIZE:
            raise ConfigError(f"parameter {self.name!r} has dtype {self.dtype!r}; {nearest(self.dtype, ITEMSIZE)}")
        if self.placement is Placement.COLUMN:
            try:
                Split.of(self.shape, self.placement)
            except ConfigError as error:
                raise ConfigError(f"parameter {self.name!r}: {error}") from None

    @cached_property
    def numel(self) -> int:
        """Elements without padding."""
        return math.prod(self.shape)
