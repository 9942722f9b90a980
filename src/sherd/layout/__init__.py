"""The shard layout: where every element of every parameter is stored. Pure arithmetic, without torch.distributed.

`placement` and `entry` (what is divided, and how), `packing` (what shares a bucket), `slicing` (how a bucket is cut),
`tree` (the order of sums), `description` (the layout as plain data), `shard_layout` (all of it; the nouns are defined
there), `reslice` (from one layout to another), `pieces` (how a bucket goes through a slot) and `topology` (who mixes
with whom, where ranks do not share a copy).
"""

from __future__ import annotations

from sherd.layout.entry import ITEMSIZE, Entry
from sherd.layout.placement import BLOCK, Placement, Region, padded, regions
from sherd.layout.reslice import Move, moves
from sherd.layout.shard_layout import BUCKET_NUMEL, Block, ShardLayout
from sherd.layout.slicing import Bucket, Place, Segment

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
