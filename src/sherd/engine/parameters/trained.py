"""Which parameters are trained, and in what layout.

A frozen parameter has no gradient, no bucket and no optimizer state. Parameters that are unfrozen later join the layout
behind the others, so that nothing that is numbered by entry or by bucket ever changes its number.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sherd.engine.parameters.inventory import Inventory
from sherd.layout.shard_layout import ShardLayout


class Trained:
    """Entry e of `layout` is `parameters[e]`, called `names[e]`, at `indices[e]` of the inventory."""

    def __init__(self, inventory: Inventory, world: int, group: int, bucket_bytes: int | None) -> None:
        self.inventory = inventory
        self.bucket_numel = inventory.bucket_numel(bucket_bytes, crosses=group < world)
        self.indices = inventory.trainable()
        self.names = [inventory.names[index] for index in self.indices]
        self.parameters: list[nn.Parameter] = [inventory.parameters[index] for index in self.indices]
        entries = inventory.entries(self.indices)
        last_first = range(len(self.indices) - 1, -1, -1)  # gradients come so
        self.layout = ShardLayout.build(entries, world, bucket_numel=self.bucket_numel, group=group, order=last_first)

    @property
    def frozen(self) -> list[int]:
        """The indices of the parameters that are not trained."""
        trained = set(self.indices)
        return [index for index in range(len(self.inventory.parameters)) if index not in trained]

    def grow(self, indices: Sequence[int]) -> None:
        """Train these parameters too."""
        self.layout = self.layout.grown(self.inventory.entries(indices))
        self.indices += indices
        self.names += [self.inventory.names[index] for index in indices]
        self.parameters += [self.inventory.parameters[index] for index in indices]
