"""Whether an optimizer is elementwise: whether it may be stepped in parts. Found by doing it, on small tensors.

Names would not do: the answer depends on options too, and users have optimizers of their own.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sherd.engine.optimizer_shard import hyper_parameters, inherited, inner_optimizer, step_unhooked
from sherd.engine.optimizer_state import State, holds_tensors
from sherd.engine.placement import BLOCK

_MATRIX = (23, 45)
_SHAPES: Mapping[int, tuple[int, ...]] = {0: (), 1: (517,), 2: _MATRIX, 3: (7, 9, 11), 4: (5, 7, 3, 9)}
_CUTS = (BLOCK, 3 * BLOCK)
"""Between blocks, where layouts cut: fused kernels round the last elements, those that fill no vector, in another way
than the rest, and so have other bits when cut elsewhere."""
_SCALES = (1.0, 100.0, 0.01)
"""Of the gradients, step by step, so that what depends on their size shows itself."""
_RATE = 0.01
"""The learning rate of the probes: it cannot decide the question, but a warm-up's rate of 0 would hide the answer."""


def why_not_elementwise(optimizer: Optimizer) -> str | None:
    """Why `optimizer` cannot be stepped in parts, or None if it can: then the parts have the very bits of the whole.

    Neither the optimizer nor the random state of torch and Python is changed.
    """
    devices = {each.device for group in optimizer.param_groups for each in group["params"]}
    accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
    before = random.getstate()
    try:
        with torch.random.fork_rng(accelerators):
            return next((reason for probe in _probes(optimizer) if (reason := probe.why_not())), None)
    finally:
        random.setstate(before)


def _probes(optimizer: Optimizer) -> Iterator[_Probe]:
    """One probe per distinct set of hyper-parameters, dtype and device."""
    seen = set()
    for group in optimizer.param_groups:
        hyper = hyper_parameters(group)
        hyper.pop("initial_lr", None)
        if "lr" in hyper:
            hyper["lr"] = torch.full_like(hyper["lr"], _RATE) if isinstance(hyper["lr"], Tensor) else _RATE
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in group["params"]:
            device = torch.device("cpu") if parameter.is_meta else parameter.device
            alike.setdefault((parameter.dtype, device), []).append(parameter)
        for (dtype, device), parameters in (alike or {(torch.float32, torch.device("cpu")): []}).items():
            # A matrix always: a rule for matrices must show even where parameters are empty until they are gathered.
            shapes = tuple(dict.fromkeys((_MATRIX, *(_SHAPES.get(each.dim(), _MATRIX) for each in parameters))))
            model = next((each for each in parameters if each.numel() and optimizer.state.get(each)), None)
            key = (repr(hyper), dtype, device, shapes, model is None)
            if key not in seen:
                seen.add(key)
                yield _Probe(optimizer, hyper, shapes, dtype, device, model)


@dataclass(frozen=True)
class _Probe:
    optimizer: Optimizer
    hyper: Mapping[str, Any]
    shapes: Sequence[tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    model: Tensor | None
    """A parameter that has state already, which the probes then have too: some classes make it in `__init__`."""

    def why_not(self) -> str | None:
        generator = torch.Generator().manual_seed(0)
        values = [self._random(shape, generator) for shape in self.shapes]
        gradients = [[self._random(shape, generator) * scale for scale in _SCALES] for shape in self.shapes]
        try:
            whole, state = self._stepped(values, gradients)
            again, _ = self._stepped(values, gradients)
        except Exception as error:  # of any class: optimizers are anybody's code
            return f"it failed on a small parameter: {_first_line(error)}"
        if not _equal(whole, again):
            return "it is random: two runs over the same gradients give other numbers"
        if any(torch.equal(new, old) for new, old in zip(whole, values, strict=True)):
            return "it steps other tensors than those in its groups"
        if any(holds_tensors(value) for kept in state.values() for value in kept.values()):
            return "it keeps tensors inside a list or dict in its state, which cannot be cut"
        try:
            parts = [
                self._in_parts(*each, cuts) for cuts in ((), _CUTS) for each in zip(values, gradients, strict=True)
            ]
        except Exception as error:
            return f"it failed on a part of a parameter: {_first_line(error)}"
        if not _equal([each.reshape(-1) for each in (*whole, *whole)], parts):
            return "it treats a parameter as a whole: stepping it in pieces gives other numbers"
        return None

    def _in_parts(self, value: Tensor, gradients: Sequence[Tensor], cuts: Sequence[int]) -> Tensor:
        """Flat, and each part by an optimizer of its own, as on owners that know nothing of each other."""
        bounds = (0, *(cut for cut in cuts if cut < value.numel()), value.numel())
        parts = []
        for begin, end in pairwise(bounds):
            own = [gradient.reshape(-1)[begin:end] for gradient in gradients]
            parts += self._stepped([value.reshape(-1)[begin:end]], [own])[0]
        return torch.cat(parts)

    def _stepped(
        self, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
    ) -> tuple[list[Tensor], Mapping[Any, State]]:
        """Copies of `values` after a step with each of their gradients, and the state that this left."""
        tensors = [value.clone() for value in values]
        state = defaultdict(dict, {tensor: self._lent_state(tensor) for tensor in tensors if self.model is not None})
        groups = [{**deepcopy(dict(self.hyper)), "params": tensors}]
        inner = inner_optimizer(type(self.optimizer), deepcopy(inherited(self.optimizer)), groups, state)
        for step in range(len(_SCALES)):
            for tensor, own in zip(tensors, gradients, strict=True):
                tensor.grad = own[step].clone()
            step_unhooked(inner)
        return tensors, inner.state

    def _lent_state(self, tensor: Tensor) -> State:
        assert self.model is not None
        lent = deepcopy(self.optimizer.state[self.model])
        for key, value in lent.items():
            if isinstance(value, Tensor) and value.shape == self.model.shape:
                lent[key] = value.new_full(tensor.shape, value.flatten()[0].item())
        return dict(lent)

    def _random(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator).to(self.device, self.dtype)


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
