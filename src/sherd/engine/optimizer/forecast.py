"""How much optimizer state a first step will create, what a step costs, and whether it costs less for merged tensors:
found by stepping a copy.

A table of optimizers would not do: the answers depend on their options, and users write their own optimizers.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.optimizer.elementwise import merging_unit, undisturbed
from sherd.engine.optimizer.inner import (
    hyper_parameters,
    inherited,
    inner_optimizer,
    is_torchs,
    step_unhooked,
)
from sherd.layout.placement import padded

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


ELEMENTS_PER_CALL = 1200
"""How many elements of gradients can be copied together in the time of a call of torch. For AdamW, which makes ten
calls for each tensor, merging makes steps of a GPT of 1.2 M parameters in 292 tensors 14% faster, and of one of 0.4 M
in 40 tensors 1.5%; those of one of 1.2 M in 76 tensors would take 2% longer."""


def merging_pays(optimizer: Optimizer) -> bool:
    """Whether calls of torch that merging saves take longer than copying gradients to one another.

    Only torch's own optimizers, with all parameters trained: a user's may look at attributes of a parameter, and would
    step a frozen one that the program gave a gradient.
    """
    tensors = [each for group in optimizer.param_groups for each in group["params"]]
    if not (is_torchs(optimizer) and all(each.requires_grad for each in tensors)):
        return False
    saved = 0
    for group in optimizer.param_groups:
        alike = Counter((each.dtype, each.device) for each in group["params"])
        saved += sum((count - 1) * _calls(optimizer, group, *kind) for kind, count in alike.items() if count > 1)
    elements: int = sum(each.numel() for each in tensors)
    return saved * ELEMENTS_PER_CALL > elements


def _calls(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> int:
    """Calls of torch in a step that each tensor costs, and need not if it is merged. Fused optimizers make none."""
    if device.type == "meta" or not merging_unit(optimizer, group, dtype):
        return 0
    one, two = (_counted(optimizer, group, dtype, device, tensors) for tensors in (1, 2))
    return two - one


def _counted(
    optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype, device: torch.device, tensors: int
) -> int:
    """Calls of torch in the second step of so many tensors."""
    small = [torch.ones(3, 5, dtype=dtype, device=device) for _ in range(tensors)]
    for each in small:
        each.grad = torch.ones_like(each)
    groups = [{**deepcopy(hyper_parameters(group)), "params": small}]
    counter = _Calls()  # type: ignore[no-untyped-call]
    try:
        with undisturbed(optimizer), torch.no_grad():
            inner = inner_optimizer(type(optimizer), deepcopy(inherited(optimizer)), groups, defaultdict(dict))
            step_unhooked(inner)
            with counter:
                step_unhooked(inner)
    except Exception:  # a user's optimizer may raise anything
        return 0
    return counter.count


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls of torch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


PER_ELEMENT = 128
"""Operations of matrix products that take as long as the rest of an update of one element. An update passes a few times
through memory, 2 to 3 ns for each element on one core, in which it makes 100 to 300 multiplications and additions of a
product in fp32. Where there are products, they take nearly all the time, so that the number hardly matters."""


def work_of(optimizer: Optimizer, members: Iterable[TrackedParameter]) -> dict[TrackedParameter, int]:
    """What a step of each of these costs, in operations of matrix products. The parameters need not exist.

    Counted, not measured: the result must be the same on all ranks. Where a step multiplies matrices, that is most of
    the work, and it depends on more than the number of elements: Muon's grows with the shorter side too.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    known: dict[Any, int] = {}
    found = {}
    for member in members:
        group, entry = groups.get(id(member.parameter), optimizer.param_groups[0]), member.entry
        key = id(group), entry.shape, member.parameter.dtype
        if key not in known:
            known[key] = _products(optimizer, group, entry.shape, member.parameter.dtype)
        found[member] = PER_ELEMENT * padded(entry.numel) + known[key]
    return found


def _products(optimizer: Optimizer, group: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Operations in the matrix products of a step. Found by a step without data."""
    tensor = torch.zeros(shape, dtype=dtype, device="meta")
    tensor.grad = torch.zeros_like(tensor)
    groups = [{**deepcopy(hyper_parameters(group)), "params": [tensor]}]
    try:
        with undisturbed(optimizer), torch.no_grad(), FlopCounterMode(display=False) as counter:
            own = deepcopy(inherited(optimizer))
            step_unhooked(inner_optimizer(type(optimizer), own, groups, defaultdict(dict)))
    except Exception:  # a user's optimizer may raise anything, and some look at values
        return 0
    return int(counter.get_total_flops())
