"""The order in which contributions are added.

Floating-point sums depend on their order, so the order is part of the layout: rank order inside *groups* of G
consecutive ranks, then group order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sherd.errors import ConfigError


@dataclass(frozen=True)
class SummationTree:
    """Rank order inside groups of `group` consecutive ranks, then group order."""

    world: int
    group: int

    def __post_init__(self) -> None:
        if self.world < 1:
            raise ConfigError(f"a summation tree needs at least one rank, got world={self.world}")
        if not 1 <= self.group <= self.world:
            raise ConfigError(
                f"the summation tree of {self.world} ranks cannot have groups of {self.group}; "
                f"write group=1 to {self.world} (the default is the number of ranks per host)"
            )

    @cached_property
    def groups(self) -> tuple[range, ...]:
        """The ranks of each group, in the order in which they are added."""
        return tuple(range(g, min(g + self.group, self.world)) for g in range(0, self.world, self.group))
