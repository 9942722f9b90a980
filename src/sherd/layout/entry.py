"""One parameter as the layout describes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sherd.errors import ConfigError, nearest
from sherd.layout.placement import Placement, Split

ITEMSIZE = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    "complex128": 16,
}
"""Bytes per element, by torch's name of the dtype, without `torch.`."""

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""Of 16 bits: what is computed of such tensors, sums and norms, is computed in fp32."""

ALIGNMENT = 64
"""In bytes, as torch's own CPU allocator aligns; with less, kernels take another path, which gives other bits."""


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a bucket by role: what its parameters are, what travels of their gradients, what is summed and
    kept, and what the optimizer steps."""

    parameter: str
    wire: str
    sum: str
    update: str

    @classmethod
    def all(cls, name: str) -> Dtypes:
        """One dtype in every role."""
        return cls(name, name, name, name)


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name that entries use."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(tensor: Tensor) -> str:
    """The name that entries use for the dtype of `tensor`."""
    return str(tensor.dtype).removeprefix("torch.")


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions of a tensor from the slowest to the fastest in memory; None if that is their own order.

    Kernels choose their path by strides, even by those of dimensions of size 1: a 1 x 1 convolution in channels_last
    has the same elements at the same addresses as a contiguous one, and gives other bits on some CPUs. So dimensions of
    size 1 are ordered too: at equal strides they are the inner ones, as in both formats. In a tensor with gaps their
    strides mean little, and kernels refuse formats that are neither: they are ordered as in one of the two.
    """
    shape, strides = tensor.shape, tensor.stride()
    if any(size > 1 and not stride for size, stride in zip(shape, strides, strict=True)) or not tensor.numel():
        return None  # expanded, or empty: there is no order
    order = tuple(sorted(range(tensor.dim()), key=lambda dimension: (-strides[dimension], shape[dimension] == 1)))
    if strides != dense_strides(shape, order):
        order = _usual_order(shape, order)
    return None if order == tuple(range(tensor.dim())) else order


def _usual_order(shape: Sequence[int], order: tuple[int, ...]) -> tuple[int, ...]:
    """A memory format that has all dimensions larger than 1 in this order, or the order itself."""
    contiguous = tuple(range(len(shape)))
    formats = (contiguous, (0, *contiguous[2:], 1)) if len(shape) in (4, 5) else (contiguous,)
    same = [usual for usual in formats if [d for d in usual if shape[d] > 1] == [d for d in order if shape[d] > 1]]
    return order if order in same or not same else same[0]


def dense_strides(shape: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """The strides of a dense tensor with its dimensions in this order."""
    strides, step = [1] * len(shape), 1
    for dimension in reversed(range(len(shape)) if order is None else order):
        strides[dimension] = step
        step *= max(shape[dimension], 1)
    return tuple(strides)


@dataclass(frozen=True)
class Entry:
    """One parameter: its name, its global shape, its dtype by torch's name (`"float32"`) and its placement.

    `order` lists its dimensions from the slowest to the fastest in memory, if that is not their own order: a
    convolution's weights may be kept channels last. Elements of the *flattened* entry are counted in this order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    placement: Placement = Placement.FLAT
    order: tuple[int, ...] | None = None
    dtypes: Dtypes | None = field(default=None, compare=False)
    """by role, if they are not all `dtype`. Chosen anew by each run: no part of a layout's description"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "placement", Placement.parse(self.placement))
        if self.order is not None:
            self._check_order(self.order)
        if any(size < 0 for size in self.shape):
            raise ConfigError(f"parameter {self.name!r} has shape {self.shape}; a size cannot be negative")
        if self.dtype not in ITEMSIZE:
            raise ConfigError(f"parameter {self.name!r} has dtype {self.dtype!r}; {nearest(self.dtype, ITEMSIZE)}")
        if self.dtypes is not None and self.dtypes.parameter != self.dtype:
            raise ConfigError(f"parameter {self.name!r} has dtype {self.dtype!r} and {self.dtypes}; write the same")
        if self.placement is Placement.COLUMN:
            try:
                Split.of(self.shape, self.placement)
            except ConfigError as error:
                raise ConfigError(f"parameter {self.name!r}: {error}") from None

    def _check_order(self, order: tuple[int, ...]) -> None:
        cut = self.placement in (Placement.ROW, Placement.COLUMN)
        if sorted(order) != list(range(len(self.shape))) or cut:
            raise ConfigError(
                f"parameter {self.name!r} of shape {self.shape} has order={order}; write each dimension once, and "
                f"placement 'flat' or 'layer'"
            )

    def flattened(self, tensor: Tensor) -> Tensor:
        """A tensor of the entry's shape, flat; a view if its memory has the entry's order."""
        return (tensor if self.order is None else tensor.permute(self.order)).reshape(-1)

    def shaped(self, flat: Tensor) -> Tensor:
        """The reverse: a view of the entry's shape."""
        return flat.view(self.shape) if self.order is None else flat.as_strided(self.shape, self.strides)

    def settled(self, tensor: Tensor) -> Tensor:
        """A tensor of the entry's shape in the memory layout of every store: dense, in the entry's order of
        dimensions, and aligned. The tensor itself, if it already is."""
        if tensor.stride() == self.strides and (tensor.device.type != "cpu" or tensor.data_ptr() % ALIGNMENT == 0):
            return tensor
        return torch.empty_strided(self.shape, self.strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    @cached_property
    def roles(self) -> Dtypes:
        """Its dtypes by role."""
        return self.dtypes or Dtypes.all(self.dtype)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """The strides of every tensor of this entry: parameter, gradient and optimizer state."""
        return dense_strides(self.shape, self.order)

    @cached_property
    def numel(self) -> int:
        """Elements without padding."""
        return math.prod(self.shape)
