"""The engine: what happens to a gradient between autograd and the next forward.

The shard layout comes first and is pure arithmetic: `placement` and `entry` (what is divided, and how), `packing` (what
shares a bucket), `slicing` (how a bucket is cut), `description` (the layout as plain data), `layout` (all of it; the
nouns are defined there) and `reslice` (from one layout to another).
"""

from __future__ import annotations

from sherd.engine.entry import ITEMSIZE, Entry
from sherd.engine.layout import BUCKET_NUMEL, Block, ShardLayout
from sherd.engine.placement import BLOCK, Placement, Region, padded, regions
from sherd.engine.reslice import Move, moves
from sherd.engine.slicing import Bucket, Place, Segment

__all__ = [
    "BLOCK",
    "BUCKET_NUMEL",
    "ITEMSIZE",
    "Block",
    "Bucket",
    "Entry",
    "Move",
    "Place",
    "Placement",
    "Region",
    "Segment",
    "ShardLayout",
    "moves",
    "padded",
    "regions",
]
