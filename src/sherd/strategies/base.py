"""The base class of strategies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from sherd.comm import Communicator
from sherd.config import Options
from sherd.engine.policy import ExchangePolicy
from sherd.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class Strategy(Options, ABC):
    """How ranks share the work: frozen options, and no state that changes during training.

    The contract: a strategy makes an `ExchangePolicy`, one per model, which says what ranks exchange and when; the
    engine acts on it without asking which strategy made it. Abstract: a subclass is a frozen dataclass whose fields are
    its options, all with defaults, registered under a name:

        @register("example")
        @dataclass(frozen=True, kw_only=True)
        class Example(Strategy):
            every: int = 1

            def policy(self, comm: Communicator, device: torch.device) -> ExchangePolicy: ...
    """

    name: ClassVar[str]
    """What users write, and what events and checkpoints record. `register` sets it."""

    def __new__(cls, *args: object, **options: object) -> Self:
        if cls is Strategy:
            raise ConfigError("Strategy is abstract; build a subclass, or write a name from sherd.strategies.names()")
        return super().__new__(cls, *args, **options)

    def team(self, comm: Communicator) -> int:
        """How many ranks, with consecutive numbers, train together: all, unless a strategy says otherwise."""
        return comm.world

    @abstractmethod
    def policy(self, comm: Communicator, device: torch.device) -> ExchangePolicy:
        """A new policy for these ranks, which are a team, and a model on `device`."""
