"""Codecs: what a contribution looks like while it travels.

A codec is fixed-rate: the bytes on the wire depend only on the number of elements, so every rank knows what to
expect. A lossy codec is applied to a rank's own contribution too: the result must not depend on who owns a slice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from sherd.errors import CodecFailed, ConfigError


class Codec(ABC):
    """Encodes flat tensors into bytes and back. Instances are immutable, and equal when class and `name` are.

    `wire_bytes` must not shrink as elements are added, and must be at least one byte per block.
    """

    #: Elements that are encoded together, independently of others; a stream is cut only at multiples of it. An
    #: incomplete last block is padded with zeros.
    block: int = 1

    @property
    @abstractmethod
    def name(self) -> str:
        """The codec and its options in one word; ranks compare it."""

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Bytes on the wire for `numel` elements."""

    @abstractmethod
    def encode(self, source: Tensor, wire: Tensor) -> None:
        """Write the flat tensor `source` into the flat uint8 tensor `wire`."""

    @abstractmethod
    def decode(self, wire: Tensor, target: Tensor) -> None:
        """Read the flat uint8 tensor `wire` into the flat tensor `target`."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


class Cast(Codec):
    """Travel in another floating-point dtype, half the bytes with bf16 or fp16."""

    def __init__(self, dtype: torch.dtype) -> None:
        if not dtype.is_floating_point:
            raise ConfigError(f"Cast needs a floating-point dtype such as torch.bfloat16, got {dtype}")
        self.dtype = dtype

    @property
    def name(self) -> str:
        return f"cast-{str(self.dtype).removeprefix('torch.')}"

    def wire_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, source: Tensor, wire: Tensor) -> None:
        wire.view(self.dtype).copy_(source)

    def decode(self, wire: Tensor, target: Tensor) -> None:
        target.copy_(wire.view(self.dtype))


def wire_bytes(numel: int, like: Tensor, codec: Codec | None = None) -> int:
    """Bytes on the wire for `numel` elements of the dtype of `like`."""
    return codec.wire_bytes(numel) if codec else numel * like.element_size()


def encode(codec: Codec, source: Tensor, wire: Tensor) -> None:
    """`codec.encode`; its errors are the codec's, not a peer's."""
    try:
        codec.encode(source, wire)
    except Exception as error:
        raise _failed(codec, "encode", source, error) from error


def encoded(codec: Codec | None, source: Tensor) -> Tensor:
    """The flat tensor `source` as bytes that travel; without a codec, a view of it."""
    if codec is None:
        return source.view(torch.uint8)
    wire = torch.empty(codec.wire_bytes(source.numel()), dtype=torch.uint8, device=source.device)
    encode(codec, source, wire)
    return wire


def decoded(codec: Codec | None, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor with what `wire` carries; without a codec, a view of it."""
    if codec is None:
        return wire.view(dtype)
    target = torch.empty(numel, dtype=dtype, device=wire.device)
    try:
        codec.decode(wire, target)
    except Exception as error:
        raise _failed(codec, "decode", target, error) from error
    return target


def _failed(codec: Codec, verb: str, tensor: Tensor, error: Exception) -> CodecFailed:
    what = f"{tensor.numel()} elements of {tensor.dtype}"
    return CodecFailed(f"codec {codec.name} could not {verb} {what}: {type(error).__name__}: {error}")
