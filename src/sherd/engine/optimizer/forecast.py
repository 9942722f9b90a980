"""How much optimizer state a first step will create, found by stepping a small copy.

A table of optimizers would not do: the answer depends on their options, and users write their own optimizers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sherd.engine.optimizer.elementwise import undisturbed
from sherd.engine.optimizer.inner import hyper_parameters, inherited, inner_optimizer, step_unhooked

_SIZES = (3, 5, 7, 11, 13, 17, 19, 23)
"""Dimensions of a small tensor: all different, so that each dimension of its state shows which one it follows."""

Kept = list[tuple[tuple[int, ...], torch.dtype]]
"""The shapes and dtypes of state tensors."""


class Forecast:
    """The state that an optimizer, stepped as a `kind`, will create for tensors that have none yet."""

    def __init__(self, optimizer: Optimizer, kind: type[Optimizer]) -> None:
        self._optimizer = optimizer
        self._kind = kind
        self._known: dict[Any, Kept | None] = {}

    def bytes(self, group: Mapping[str, Any], tensors: Sequence[Tensor]) -> int | None:
        """Bytes of the state tensors after a first step of `tensors`, with the hyper-parameters of `group`.

        None if that cannot be determined.
        """
        total = 0
        for tensor in tensors:
            kept = self._kept(group, tensor)
            if kept is None:
                return None
            total += sum(math.prod(_scaled(shape, tensor.shape)) * dtype.itemsize for shape, dtype in kept)
        return total

    def _kept(self, group: Mapping[str, Any], tensor: Tensor) -> Kept | None:
        key = id(group), tensor.dtype, tensor.device, tensor.dim()
        if key not in self._known:
            self._known[key] = self._tried(group, tensor)
        return self._known[key]

    def _tried(self, group: Mapping[str, Any], tensor: Tensor) -> Kept | None:
        if tensor.dim() > len(_SIZES):
            return None
        device = "cpu" if tensor.is_meta else tensor.device
        small = torch.ones(_SIZES[: tensor.dim()], dtype=tensor.dtype, device=device)
        small.grad = torch.ones_like(small)
        groups = [{**deepcopy(hyper_parameters(group)), "params": [small]}]
        try:
            with undisturbed(self._optimizer), torch.no_grad():
                own = deepcopy(inherited(self._optimizer))
                inner = inner_optimizer(self._kind, own, groups, defaultdict(dict))
                step_unhooked(inner)
        except Exception:  # a user's optimizer may raise anything, and some need a closure
            return None
        kept = (value for value in inner.state.get(small, {}).values() if isinstance(value, Tensor))
        return [(tuple(value.shape), value.dtype) for value in kept]

    def dtypes(self) -> set[torch.dtype]:
        """Those of what is kept per element, as far as that is known."""
        found: set[torch.dtype] = set()
        for group in self._optimizer.param_groups:
            for tensor in group["params"]:
                kept = self._kept(group, tensor) or []
                found.update(dtype for shape, dtype in kept if shape and len(shape) == tensor.dim())
        return found


def _scaled(shape: Sequence[int], real: Sequence[int]) -> list[int]:
    """A shape of the small tensor's state, scaled to a tensor of shape `real`."""
    small = _SIZES[: len(real)]
    sizes = {**dict(zip(small, real, strict=True)), math.prod(small): math.prod(real)} if real else {}
    return [sizes.get(size, size) for size in shape]
