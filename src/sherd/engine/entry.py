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


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions of a dense tensor from the slowest to the fastest in memory; None if it is contiguous, or has gaps
    or elements in common, so that it has to be copied."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension]))
    return order if not tensor.is_contiguous() and tensor.permute(order).is_contiguous() else None


@dataclass(frozen=True)
class Entry:
    """One parameter: its name, its global shape, its dtype by torch's name (`"float32"`) and its placement.

    `order` has its dimensions from the slowest to the fastest in memory, where that is not the order of their numbers:
    a convolution's weights may be kept channels last. Elements of the *flattened* entry are counted in this order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    placement: Placement = Placement.FLAT
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "placement", Placement.parse(self.placement))
        if self.order is not None:
            self._check_order(self.order)
        if any(size < 0 for size in self.shape):
            raise ConfigError(f"parameter {self.name!r} has shape {self.shape}; a size cannot be negative")
        if self.dtype not in ITEMSIZE:
            raise ConfigError(f"parameter {self.name!r} has dtype {self.dtype!r}; {nearest(self.dtype, ITEMSIZE)}")
        if self.placement is Placement.COLUMN:
            try:
                Split.of(self.shape, self.placement)
            except ConfigError as error:
                raise ConfigError(f"parameter {self.name!r}: {error}") from None

    def _check_order(self, order: tuple[int, ...]) -> None:
        if sorted(order) != list(range(len(self.shape))) or self.placement is not Placement.FLAT:
            raise ConfigError(
                f"parameter {self.name!r} of shape {self.shape} has order={order}; write each dimension once, and "
                f"placement 'flat'"
            )

    def flattened(self, tensor: Tensor) -> Tensor:
        """A tensor of the entry's shape, element by element; a view where its memory has that order."""
        return (tensor if self.order is None else tensor.permute(self.order)).reshape(-1)

    def shaped(self, flat: Tensor) -> Tensor:
        """The reverse: a view of the entry's shape."""
        if self.order is None:
            return flat.view(self.shape)
        places = sorted(range(len(self.order)), key=self.order.__getitem__)
        return flat.view([self.shape[dimension] for dimension in self.order]).permute(places)

    @cached_property
    def numel(self) -> int:
        """Elements without padding."""
        return math.prod(self.shape)
