"""What the user sees in `optimizer.state` where a rank has all of it: views of what is kept, parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sherd.engine.optimizer.runs import Counters, Part


class ShownState:
    """Shows the state of parts, and finds what the user has put in its place. In a steady step that takes a few
    comparisons of identities per parameter."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._everything: list[Any] = []
        self._by_part: dict[Part, list[Any]] = {}
        self._counters: Counters | None = None

    def changed(self, counters: Counters) -> bool:
        """Whether the user has changed anything besides tensors per element, which are the very memory."""
        return counters.edited() or not same(self._everything, _seen(self._optimizer.state))

    def replaced(self, parts: Iterable[Part]) -> dict[Tensor, Any]:
        """What the user has put in the place of what is kept for these parts, by parameter; empty if it was removed."""
        found = {part: self._optimizer.state.get(part.member.parameter, {}) for part in parts}
        return {
            part.member.parameter: state
            for part, state in found.items()
            if not same(self._by_part.get(part, ()), [*state, *state.values()])
        }

    def is_by(self, counters: Counters) -> bool:
        """Whether what is shown has these counters."""
        return self._counters is counters and not counters.replaced

    def show(self, parts: Iterable[Part], rest: Mapping[Any, Any], counters: Counters) -> None:
        """Show the state of these parts, and the rest."""
        state = self._optimizer.state
        for part in parts:
            self._by_part[part] = [*part.state, *part.state.values()]
            if part.state:
                state[part.member.parameter] = part.state
            else:
                state.pop(part.member.parameter, None)
        state.update(rest)
        self._everything, self._counters = _seen(state), counters


def _seen(state: Mapping[Any, Any]) -> list[Any]:
    """Everything that can be replaced in an optimizer's state."""
    kept = [values for values in state.values() if isinstance(values, dict)]
    inside = map(dict.values, kept)
    return [*state, *state.values(), *chain.from_iterable(kept), *chain.from_iterable(inside)]


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether they are the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))
