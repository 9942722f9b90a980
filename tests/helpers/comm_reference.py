"""What every operation must give, computed by one process from all ranks' inputs. No sherd arithmetic in here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
OPERATORS = {"sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}


def tensor_of(rank: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A rank's input; every process can make every rank's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-1000, 1000, tuple(shape), generator=generator, dtype=dtype)


def reduced(inputs: Sequence[Tensor], group: int, op: str = "sum", dtype: torch.dtype | None = None) -> Tensor:
    """Rank order inside groups of `group` ranks, then group order; halves are added in fp32, rounded per group."""
    wire = inputs[0].dtype
    wide = torch.float32 if wire in (torch.bfloat16, torch.float16) else wire
    partials = []
    for start in range(0, len(inputs), group):
        members = inputs[start : start + group]
        partial = members[0].to(wide)
        for member in members[1:]:
            partial = OPERATORS[op](partial, member.to(wide))
        partials.append(partial if group >= len(inputs) else partial.to(wire).to(wide))
    total = partials[0]
    for partial in partials[1:]:
        total = OPERATORS[op](total, partial)
    if op == "mean":
        total = total / len(inputs) if wire.is_floating_point else total.div(len(inputs), rounding_mode="floor")
    return total.to(dtype or wire)
