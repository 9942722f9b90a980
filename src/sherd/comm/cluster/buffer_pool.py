"""Buffers that are reused: touching new pages costs as much as sending what they hold."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

KEPT = 16  # two for each reduction: a host's sums, and those of the others
LARGE_ENOUGH = 1 << 16  # bytes; the allocator itself reuses smaller ones


class BufferPool:
    """The last few buffers that a rank or its lane gave back."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor, not initialised."""
        nbytes = numel * dtype.itemsize
        with self._lock:
            for index, kept in enumerate(self._kept):
                if nbytes <= kept.numel() <= 2 * nbytes:
                    return self._kept.pop(index)[:nbytes].view(dtype)
        return torch.empty(numel, dtype=dtype)

    def give_back(self, tensor: Tensor) -> None:
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        if whole.numel() >= LARGE_ENOUGH:
            with self._lock:
                self._kept = [*self._kept[1 - KEPT :], whole]
