"""The user's optimizer itself, stepping every parameter on every rank."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sherd.comm import Communicator
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.optimizer.elementwise import why_not_elementwise
from sherd.engine.optimizer.shard import step_unhooked


class WholeOptimizer:
    """The user's optimizer updates every parameter on every rank, from `p.grad`."""

    def __init__(self, optimizer: Optimizer, buckets: BucketList) -> None:
        self._optimizer = optimizer
        self._kind = type(optimizer)
        self._buckets = buckets
        self.takes_closure = why_not_elementwise(optimizer) is not None
        """Whether `step` may call the closure more than once, as LBFGS does."""
        closure = inspect.signature(self._kind.step).parameters.get("closure")
        self.needs_closure = closure is not None and closure.default is closure.empty
        """Whether `step` requires a closure: it needs the loss."""

    def follow(self, buckets: BucketList) -> None:
        """More is trained from now on: torch's own step finds its gradients."""
        self._buckets = buckets

    def step(self, closure: Any = None) -> Any:
        loss = step_unhooked(self._optimizer, self._kind, *(() if closure is None else (closure,)))
        for member in self._buckets.parameters:
            member.settle()  # p.data = p.data - ...
        return loss

    def whole_state(self, comm: Communicator) -> dict[Any, Any]:
        return dict(self._optimizer.state)

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        return self._kind.state_dict(self._optimizer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kind.load_state_dict(self._optimizer, dict(state))

    def state_bytes(self) -> int:
        kept = (
            value for state in self._optimizer.state.values() if isinstance(state, dict) for value in state.values()
        )
        return sum(getattr(value, "nbytes", 0) for value in kept)

    @property
    def users(self) -> tuple[Optimizer, type[Optimizer]]:
        """The user's optimizer and its original class."""
        return self._optimizer, self._kind

    def coming(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """By group: the parameters that have no state yet."""
        state, groups = self._optimizer.state, self._optimizer.param_groups
        return [(group, [p for p in group["params"] if p.requires_grad and not state.get(p)]) for group in groups]

    def state_entries(self) -> int:
        return len(self._optimizer.state)
