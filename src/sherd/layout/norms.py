"""Norms that do not depend on how a tensor is cut: of blocks, added in their order."""

from __future__ import annotations

import torch
from torch import Tensor

from sherd.layout.entry import HALF_DTYPES
from sherd.layout.placement import BLOCK, padded


def norm_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """What the norms of blocks are taken in, if not in their own dtype."""
    # Not fp64, which takes 20 times as long: the error over 256 elements is far below that of a 16-bit gradient.
    return torch.float32 if dtype in HALF_DTYPES else None


def block_norms(flat: Tensor) -> Tensor:
    """The 2-norms of the blocks of a flat tensor, in fp64 on the CPU. What the last block lacks counts as zero.

    A cut between blocks changes none of them.
    """
    dtype = norm_dtype(flat.dtype)
    if flat.numel() % BLOCK == 0:
        whole_blocks: Tensor = torch.linalg.vector_norm(flat.view(-1, BLOCK), dim=1, dtype=dtype)
        return whole_blocks.to("cpu", torch.float64)
    norms = torch.zeros(padded(flat.numel()) // BLOCK, dtype=torch.float64)
    whole = flat.numel() // BLOCK
    if whole:
        norms[:whole] = torch.linalg.vector_norm(flat[: whole * BLOCK].view(-1, BLOCK), dim=1, dtype=dtype)
    tail = torch.nn.functional.pad(flat[whole * BLOCK :], (0, BLOCK - flat.numel() % BLOCK))
    norms[whole] = torch.linalg.vector_norm(tail.view(1, BLOCK), dim=1, dtype=dtype)[0]
    return norms


def added(norms: Tensor) -> Tensor:
    """The norms of tensors whose blocks have these: the last dimension goes away."""
    if not norms.shape[-1]:
        return norms.new_zeros(norms.shape[:-1])
    # cumsum adds in order; sum() does not, and its order depends on the number of threads.
    return norms.square().cumsum(-1)[..., -1].sqrt()
