"""Buffers that are used again: touching new pages costs as much as sending what they hold."""

from __future__ import annotations

import torch
from torch import Tensor

KEPT = 4
LARGE_ENOUGH = 1 << 16  # bytes; the allocator itself keeps what is smaller


class Spares:
    """The last few buffers that were given back."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor with anything in it."""
        nbytes = numel * dtype.itemsize
        for index, kept in enumerate(self._kept):
            if nbytes <= kept.numel() <= 2 * nbytes:
                return self._kept.pop(index)[:nbytes].view(dtype)
        return torch.empty(numel, dtype=dtype)

    def give_back(self, tensor: Tensor) -> None:
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        if whole.numel() >= LARGE_ENOUGH:
            self._kept = [*self._kept[1 - KEPT :], whole]
