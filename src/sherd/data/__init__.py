"""Data: a user's DataLoader, sharded over the ranks in place.

Read in this order: `dealing` (who gets what: pure arithmetic), `share` (how much a batch counts), `way` (what a way of
sharding is), `samplers`, `iterable` and `alone` (the ways), `loader` (how torch's loader is led along one), `sharding`
(which), `restore` (what an object of the user's was before).
"""

from __future__ import annotations

from sherd.data.sharding import Sharding, announce, compare, plan, shard

__all__ = ["Sharding", "announce", "compare", "plan", "shard"]
