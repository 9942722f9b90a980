"""What no operation can move or write, refused before anything is sent."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from sherd.errors import ConfigError, Unsupported


def check_kinds(rank: int, operation: str, input: object, output: object) -> None:
    """Refuse what is no tensor; an output may be missing."""
    for thing in (input, *(() if output is None else (output,))):
        if not isinstance(thing, Tensor):
            raise ConfigError(f"rank {rank}: {operation} takes tensors, got {thing!r}")


def check_tensor(rank: int, operation: str, tensor: Tensor, dry: bool) -> None:
    """Refuse a tensor whose elements cannot be moved. In a `dry` run there are none."""
    if tensor.layout is not torch.strided:
        what, fix = f"a sparse tensor ({tensor.layout})", "write x.to_dense()"
    elif tensor.is_meta and not dry:
        what, fix = "a tensor on the meta device, which has no values", "put it on a device that has memory"
    elif tensor.is_quantized:
        what, fix = f"a quantised tensor ({tensor.dtype})", "send x.int_repr(), and its scale beside it"
    elif not _can_copy(tensor.dtype):
        what, fix = f"a tensor of {tensor.dtype}, which torch itself cannot copy", "write x.view(torch.uint8)"
    else:
        return
    raise Unsupported(f"rank {rank}: {operation} got {what}; {fix}")


def refuse_expanded(call: str, output: Tensor) -> None:
    """Refuse an output that torch could not copy the result into at the end."""
    if any(size > 1 and not stride for size, stride in zip(output.shape, output.stride(), strict=True)):
        raise ConfigError(
            f"the result of {call} cannot be written into an expanded tensor, several of whose elements are one; write "
            f"x.contiguous()"
        )


@cache
def _can_copy(dtype: torch.dtype) -> bool:
    """There are dtypes that are little more than a name."""
    try:
        zeros = torch.zeros(2 * dtype.itemsize, dtype=torch.uint8).view(dtype)
        torch.empty_like(zeros).copy_(zeros)
    except (RuntimeError, TypeError):
        return False
    return True
