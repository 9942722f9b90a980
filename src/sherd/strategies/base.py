"""The base class of strategies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from sherd.comm import Communicator
from sherd.config import Options
from sherd.engine.choices import Choices
from sherd.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class Strategy(Options, ABC):
    """How ranks share the work: frozen options, and no state that changes during training.

    The contract: a strategy only *chooses* (where parameters live, who owns a slice, when ranks exchange); the engine
    acts on the choices without asking which strategy made them. Abstract: a subclass is a frozen dataclass whose fields
    are its options, all with defaults, registered under a name:

        @register("example")
        @dataclass(frozen=True, kw_only=True)
        class Example(Strategy):
            every: int = 1

            def choose(self, comm: Communicator, device: torch.device) -> Choices: ...
    """

    name: ClassVar[str]
    """What users write, and what events and checkpoints record. `register` sets it."""

    def __new__(cls, *args: object, **options: object) -> Self:
        if cls is Strategy:
            raise ConfigError("Strategy is abstract; build a subclass, or write a name from sherd.strategies.names()")
        return super().__new__(cls, *args, **options)

    @abstractmethod
    def choose(self, comm: Communicator, device: torch.device) -> Choices:
        """The choices for these ranks and a model on `device`."""
