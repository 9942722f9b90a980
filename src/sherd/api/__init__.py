"""What a user calls: `distribute`, and what can be said about a distributed model afterwards.

Read `training` first: a whole step on one screen. A call of `distribute` is a `plan`, on which ranks agree `together`,
and its `carrying_out`. `helpers`, `metrics`, `seeding` and `bars` are for what is around the loop; they stand on
`process`.
"""

from __future__ import annotations

from sherd.api.bars import progress
from sherd.api.distribution import distribute
from sherd.api.functions import clip_grad_norm_, describe, full_grad, full_parameters, no_sync, weigh
from sherd.api.helpers import barrier, broadcast, main_first, print
from sherd.api.log import log
from sherd.api.metrics import gather, mean
from sherd.api.process import is_main, rank, world
from sherd.api.seeding import seed

__all__ = [
    "barrier",
    "broadcast",
    "clip_grad_norm_",
    "describe",
    "distribute",
    "full_grad",
    "full_parameters",
    "gather",
    "is_main",
    "log",
    "main_first",
    "mean",
    "no_sync",
    "print",
    "progress",
    "rank",
    "seed",
    "weigh",
    "world",
]
