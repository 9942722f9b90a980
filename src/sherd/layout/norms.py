"""Norms that do not depend on how a tensor is cut: of blocks, added in their order."""

from __future__ import annotations

import torch
from torch import Tensor

from sherd.layout.entry import HALF_DTYPES
from sherd.layout.placement import BLOCK, padded


def row_norms(blocks: Tensor) -> Tensor:
    """The 2-norms of blocks, one in each row; those of 16 bits in fp32."""
    # Not in fp64, which takes 20 times as long: the error over 256 elements is far below that of a 16-bit gradient.
    wide = torch.float32 if blocks.dtype in HALF_DTYPES else None
    norms: Tensor = torch.linalg.vector_norm(blocks, dim=1, dtype=wide)
    return norms


def block_norms(flat: Tensor) -> Tensor:
    """The 2-norms of the blocks of a flat tensor, in fp64 on the CPU. What the last block lacks counts as zero.

    A cut between blocks changes none of them.
    """
    if flat.numel() % BLOCK == 0:
        return row_norms(flat.view(-1, BLOCK)).to("cpu", torch.float64)
    norms = torch.zeros(padded(flat.numel()) // BLOCK, dtype=torch.float64)
    whole = flat.numel() // BLOCK
    if whole:
        norms[:whole] = row_norms(flat[: whole * BLOCK].view(-1, BLOCK))
    tail = torch.nn.functional.pad(flat[whole * BLOCK :], (0, BLOCK - flat.numel() % BLOCK))
    norms[whole] = row_norms(tail.view(1, BLOCK))[0]
    return norms


def added(norms: Tensor) -> Tensor:
    """The norms of tensors whose blocks have these: the last dimension goes away."""
    if not norms.shape[-1]:
        return norms.new_zeros(norms.shape[:-1])
    # cumsum adds in order; sum() does not, and its order depends on the number of threads.
    return norms.square().cumsum(-1)[..., -1].sqrt()
