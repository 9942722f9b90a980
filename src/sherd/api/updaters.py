"""Who updates the parameters: the user's optimizer itself, or a shard of it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sherd.comm import Communicator
from sherd.engine.choices import Choices, Parameters
from sherd.engine.engine import Engine
from sherd.engine.optimizer.elementwise import own_collective, why_not_elementwise
from sherd.engine.optimizer.shard import OptimizerShard, step_unhooked
from sherd.errors import ConfigError
from sherd.strategies import Strategy

log = logging.getLogger("sherd")


class WholeUpdater:
    """The user's optimizer updates every parameter on every rank, from `p.grad`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kind = type(optimizer)
        self.takes_closure = why_not_elementwise(optimizer) is not None
        """Whether `step` may want the closure more than once, as LBFGS does."""
        closure = inspect.signature(self._kind.step).parameters.get("closure")
        self.needs_closure = closure is not None and closure.default is closure.empty
        """Whether `step` cannot do without one: it wants the loss."""

    def step(self, used: Sequence[bool], closure: Any = None) -> Any:
        return step_unhooked(self._optimizer, self._kind, *(() if closure is None else (closure,)))

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
        """The user's optimizer, and the class that it was made of."""
        return self._optimizer, self._kind

    def coming(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """By group: the parameters that have no state yet."""
        state, groups = self._optimizer.state, self._optimizer.param_groups
        return [(group, [p for p in group["params"] if p.requires_grad and not state.get(p)]) for group in groups]

    def state_entries(self) -> int:
        return len(self._optimizer.state)


def check_optimizer(optimizer: Optimizer, choices: Choices, strategy: Strategy) -> None:
    """Refuse an optimizer that cannot work in parts where that is what the strategy asks for."""
    name = type(optimizer).__name__
    if choices.parameters is Parameters.REPLICAS:
        # Not refused: one that divides the work among ranks, and does nothing to gradients, is right here too.
        if (collective := own_collective(optimizer)) and torch.distributed.get_rank() == 0:
            log.warning(
                "%s communicates by itself: its step() calls %s of torch.distributed. sherd has averaged the gradients "
                "by then, and the ranks have the same ones; use the optimizer's single-process variant if it has one",
                name,
                collective,
            )
        return
    if why_not := why_not_elementwise(optimizer):
        own_words = f". Its own words: {why_not.own_words}" if why_not.own_words else ""
        raise ConfigError(
            f"{name} cannot be sharded: {why_not.cause}. strategy={strategy.name!r} updates every parameter in flat "
            f"parts; {why_not.fix}{own_words}"
        )


def updater_for(optimizer: Optimizer, engine: Engine) -> WholeUpdater | OptimizerShard:
    """Who updates what this rank is to update."""
    if engine.choices.parameters is Parameters.REPLICAS:
        return WholeUpdater(optimizer)
    shard = OptimizerShard(
        optimizer,
        engine.layout,
        engine.comm.rank,
        engine.trained.parameters,
        engine.store.slices,
        engine.gradients.slices,
        frozen=engine.inventory.parameters,
    )
    engine.on_growth.append(lambda: shard.grow(engine.layout))
    return shard


def check_parameters(parameters: Sequence[nn.Parameter], known: Sequence[nn.Parameter], where: str) -> None:
    """Refuse parameters that are not the distributed model's: ranks would never agree on them."""
    ours = {id(parameter) for parameter in known}
    for position, parameter in enumerate(parameters):
        if id(parameter) not in ours:
            raise ConfigError(
                f"{where} has at position {position} a parameter of shape {tuple(parameter.shape)} that is not the "
                f"distributed model's; build the optimizer from model.parameters(), or distribute all models that it "
                f"trains together: sherd.distribute(encoder, decoder, optimizer)"
            )
