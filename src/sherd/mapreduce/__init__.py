"""Work on data, dealt to the ranks on demand: `map_reduce`, and `evaluate` on top of it.

Read in this order: `tree` (the order of merging: pure arithmetic), `values`, `reductions` and `keys`; `sources` (what
is mapped over), `agreeing` (what ranks compare first), `dealing` (who computes which chunk), `mapping` (the map phase),
`grouping` (the reduce phase) and `reducing` (`map_reduce` itself); then `metrics`, `lock_step` and `evaluation`.
"""

from __future__ import annotations

from sherd.mapreduce.evaluation import evaluate
from sherd.mapreduce.reducing import map_reduce

__all__ = ["evaluate", "map_reduce"]
