"""A user's DataLoader, sharded over the ranks in place.

Read in this order: `dealing` (which rank gets what: pure arithmetic), `batch_weight` (how much a batch counts),
`scheme` (the interface of a sharding scheme), `order`, `samplers` and `iterable` (the schemes), `loader` (how torch's
loader follows one), `sharding` (which one a loader gets), `restore` (undoing changes to a user's object).
"""

from __future__ import annotations

from sherd.data.sharding import Sharding, announce, compare, plan, shard

__all__ = ["Sharding", "announce", "compare", "plan", "shard"]
