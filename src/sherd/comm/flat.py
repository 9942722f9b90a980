"""Flat contiguous tensors, which transports take, instead of a caller's of any shape and strides."""

from __future__ import annotations

import torch
from torch import Tensor

from sherd.comm.checked_call import CheckedCall, refuse_expanded

FLAT = (1,)  # the strides of a flat tensor


def flat_input(tensor: Tensor) -> Tensor:
    """The same elements in one dimension, without gaps: a view where that is possible."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.stride() == FLAT else _line(tensor.reshape(-1))


def _line(flat: Tensor) -> Tensor:
    """The same elements, contiguous. A single one may have any stride, which torch would not view as bytes."""
    if flat.stride() == FLAT:
        return flat
    return flat.contiguous() if flat.numel() > 1 else flat.as_strided(flat.shape, FLAT)


def flat_output(output: Tensor, checked: CheckedCall) -> Tensor:
    """What to write instead of `output`: the same memory, or new memory where `output` has gaps."""
    target = output.detach() if output.requires_grad else output
    if target.is_contiguous():
        return _line(target.view(-1))
    refuse_expanded(checked.call.text, target)
    return torch.empty(target.numel(), dtype=checked.dtype, device=target.device)
