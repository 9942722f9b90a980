"""Tries an optimizer on small tensors, whole and in parts."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from sherd.engine.optimizer.inner import inherited, inner_optimizer, step_unhooked
from sherd.engine.optimizer.portions import State
from sherd.engine.optimizer.regimes import CUTS, MERGED, RANDOM, Draw, Regime
from sherd.engine.optimizer.state import holds_tensors
from sherd.layout.placement import padded


@dataclass(frozen=True)
class WhyNot:
    """Why an optimizer cannot be stepped in parts."""

    cause: str
    fix: str = 'write strategy="ddp", which keeps parameters whole'
    own_words: str = ""
    """The first line of the optimizer's own exception."""


BY_CLOSURE = WhyNot("its step() needs a closure, and decides by the whole loss that it returns")


class Step(NamedTuple):
    """The inputs and the result of one step of a run; one item per tensor."""

    weights: list[Tensor]
    gradients: list[Tensor]
    stepped: list[Tensor]


@dataclass(frozen=True)
class Probe:
    """Tries one set of hyper-parameters."""

    optimizer: Optimizer
    hyper: Mapping[str, Any]
    shapes: Sequence[tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    model: Tensor | None
    """A parameter that already has state, which the probes copy: some classes create it in `__init__`."""
    special: Sequence[Sequence[Regime]]
    """The runs to make after the random one."""

    def why_not(self) -> WhyNot | None:
        """Why parameters cannot be stepped in parts."""
        try:
            steps, state = self.record(RANDOM)
            if self._is_random(steps):
                return WhyNot("it is random: two runs over the same gradients give different numbers")
        except Exception as error:  # a user's optimizer may raise anything
            return _failed("it needs more than parameters with dense gradients, and so cannot be tried in parts", error)
        if not all(map(any, zip(*(_moved(step) for step in steps), strict=True))):
            return WhyNot("it steps tensors that are not in its groups")
        if any(holds_tensors(value) for kept in state.values() for value in kept.values()):
            return WhyNot("it keeps tensors inside a list or dict in its state, which cannot be cut")
        try:
            same = self._same_in_parts(steps, ()) and self._same_in_parts(steps, CUTS)
            with _one_thread():
                same = same and all(self._same_in_parts(self.record(run, partly=True)[0], CUTS) for run in self.special)
        except Exception as error:
            return _failed("it needs parameters of a certain shape, or their attributes, and parts are flat", error)
        return None if same else WhyNot("it treats a parameter as a whole: stepping it in pieces changes the result")

    def why_not_apart(self) -> WhyNot | None:
        """Why parameters cannot be stepped each by itself, as where every one has another owner."""
        two_of_each = replace(self, shapes=(*self.shapes, *self.shapes))
        try:
            steps, _ = two_of_each.record(RANDOM)
            if two_of_each._is_random(steps):  # its owner's draw is as good as any
                apart = two_of_each._apart_if_seeded(steps[0])
                return None if apart else WhyNot("it is random, and its step of one parameter depends on the others")
        except Exception as error:
            return _failed("it needs more than parameters with dense gradients, and so cannot be tried", error)
        if not all(map(any, zip(*(_moved(step) for step in steps), strict=True))):
            return WhyNot("it steps tensors that are not in its groups")
        try:
            same = two_of_each._same_apart(steps)
            with _one_thread():
                runs = (two_of_each.record(run, partly=True)[0] for run in self.special)
                same = same and all(map(two_of_each._same_apart, runs))
        except Exception as error:
            return _failed("it needs all its parameters at once", error)
        return None if same else WhyNot("its step of one parameter depends on the others")

    def _is_random(self, steps: Sequence[Step]) -> bool:
        again, _ = self.record(RANDOM)
        return not all(_equal(one.stepped, other.stepped) for one, other in zip(steps, again, strict=True))

    def _apart_if_seeded(self, step: Step) -> bool:
        """Whether, with the same draws, a tensor is stepped the same whatever gradients the others have."""
        expected = self._seeded(step.weights, step.gradients)
        for index, own in enumerate(step.gradients):
            others = [own if place == index else 1024 * each for place, each in enumerate(step.gradients)]
            if not torch.equal(self._seeded(step.weights, others)[index], expected[index]):
                return False
        return _equal(self._seeded(step.weights, step.gradients), expected)  # else it draws from elsewhere

    def _seeded(self, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        tensors = [each.clone() for each in weights]
        return [each.clone() for each in _stepped(self._inner(tensors), tensors, weights, gradients)]

    def _same_apart(self, steps: Sequence[Step]) -> bool:
        """Whether the steps give the same result if each tensor is stepped without the others."""
        for index in range(len(self.shapes) if steps else 0):
            own = [Step(*([tensors[index]] for tensors in step)) for step in steps]
            tensors = [own[0].weights[0].clone()]
            inner = self._inner(tensors)
            if not all(_equal(_stepped(inner, tensors, s.weights, s.gradients), s.stepped) for s in own):
                return False
        return True

    def same_merged(self) -> bool:
        """Whether tensors give the same result end to end in one tensor, with padding between them."""
        try:
            with _one_thread():
                return self._same_merged(self.record(MERGED)[0])
        except Exception:  # a user's optimizer may raise anything
            return False

    def _same_merged(self, steps: Sequence[Step]) -> bool:
        begins = [0, *accumulate(padded(each.numel()) for each in steps[0].weights)]
        whole = torch.zeros(begins.pop(), dtype=self.dtype, device=self.device)
        inner = self._inner([whole])
        for step in steps:
            weights, gradients = whole.clone(), torch.zeros_like(whole)
            for begin, weight, gradient in zip(begins, step.weights, step.gradients, strict=True):
                weights[begin : begin + weight.numel()] = weight
                gradients[begin : begin + weight.numel()] = gradient
            (stepped,) = _stepped(inner, [whole], [weights], [gradients])
            found = [stepped[begin : begin + each.numel()] for begin, each in zip(begins, step.stepped, strict=True)]
            if not _equal(found, step.stepped):
                return False
        return True

    def record(self, run: Iterable[Regime], partly: bool = False) -> tuple[list[Step], Mapping[Any, State]]:
        """Step whole tensors through `run`; return the steps and the final state.

        With `partly` an exception only ends the run: if the whole cannot be stepped either, parts are not the cause.
        """
        generator = torch.Generator().manual_seed(0)
        exact = torch.promote_types(self.dtype, torch.float64)
        tensors = [torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in self.shapes]
        drawn = [torch.zeros(shape, dtype=exact) for shape in self.shapes]
        inner = self._inner(tensors)
        steps: list[Step] = []
        for regime in run:
            weights = [each.to("cpu", exact, copy=True) for each in tensors]
            draws = [Draw(weight, own, generator) for weight, own in zip(weights, drawn, strict=True)]
            if regime.weight is not None:
                draws = [draw._replace(weight=regime.weight(draw)) for draw in draws]
            drawn = [regime.gradient(draw) for draw in draws]
            weights = [draw.weight.to(self.device, self.dtype) for draw in draws]
            gradients = [each.to(self.device, self.dtype) for each in drawn]
            try:
                steps.append(Step(weights, gradients, _stepped(inner, tensors, weights, gradients)))
            except Exception:
                if not partly:
                    raise
                break
        return steps, inner.state

    def _same_in_parts(self, steps: Sequence[Step], cuts: Sequence[int]) -> bool:
        """Whether the steps give the same result if each part is stepped without the others."""
        for begin, end in pairwise((0, *cuts, None)):
            own = [Step(*(_parts(tensors, begin, end) for tensors in step)) for step in steps]
            tensors = [each.clone() for each in own[0].weights] if own else []
            inner = self._inner(tensors)
            for step in own:
                if not _equal(_stepped(inner, tensors, step.weights, step.gradients), step.stepped):
                    return False
        return True

    def _inner(self, tensors: list[Tensor]) -> Optimizer:
        state = defaultdict(dict, {tensor: self._lent_state(tensor) for tensor in tensors if self.model is not None})
        groups = [{**deepcopy(dict(self.hyper)), "params": tensors}]
        return inner_optimizer(type(self.optimizer), deepcopy(inherited(self.optimizer)), groups, state)

    def _lent_state(self, tensor: Tensor) -> State:
        assert self.model is not None
        lent = deepcopy(self.optimizer.state[self.model])
        for key, value in lent.items():
            if isinstance(value, Tensor) and value.shape == self.model.shape:
                lent[key] = value.new_full(tensor.shape, value.flatten()[0].item())
        return dict(lent)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: some operations wake all threads for a thousand elements, which takes seconds on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _stepped(
    inner: Optimizer, tensors: Sequence[Tensor], weights: Sequence[Tensor], gradients: Sequence[Tensor]
) -> list[Tensor]:
    """The weights after a step from `weights`."""
    for tensor, weight, gradient in zip(tensors, weights, gradients, strict=True):
        tensor.copy_(weight)
        tensor.grad = gradient.clone()
    step_unhooked(inner)
    return [tensor.clone() for tensor in tensors]


def _moved(step: Step) -> list[bool]:
    return [not torch.equal(before, after) for before, after in zip(step.weights, step.stepped, strict=True)]


def _parts(tensors: Iterable[Tensor], begin: int | None, end: int | None) -> list[Tensor]:
    """Elements `begin` to `end` of each tensor; flat, except for tensors without dimensions."""
    parts = ((each, each.reshape(-1)[begin:end]) for each in tensors)
    return [part if each.dim() else part.reshape(()) for each, part in parts if part.numel()]


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Equal to the last bit; NaN equals NaN, as after an overflow."""
    return all(
        torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())
        for one, other in zip(some, others, strict=True)
    )


def _failed(cause: str, error: Exception) -> WhyNot:
    own_words = f"{type(error).__name__}: {error}".splitlines()[0]
    if "closure" in own_words:
        return WhyNot(BY_CLOSURE.cause, own_words=own_words)
    return WhyNot(cause, own_words=own_words)
