"""What a user calls: `distribute`, and the functions for models that are distributed.

Read `training` first: a whole step on one screen. Then a call of `distribute`, in its own order: `distribution`,
`arguments`, `plan` (checked, but nothing changed yet), `apply`. `members` knows which modules are distributed;
`functions` and `description` are for models that are. `recording` writes events; `helpers` is for the rest of a script.
"""

from __future__ import annotations

from sherd.api.distribution import distribute
from sherd.api.functions import clip_grad_norm_, consensus, describe, full_grad, full_parameters, no_sync, weigh
from sherd.api.helpers.bars import progress
from sherd.api.helpers.coordination import barrier, broadcast, main_first, print
from sherd.api.helpers.log import log
from sherd.api.helpers.metrics import gather, mean
from sherd.api.helpers.process import is_main, rank, world
from sherd.api.helpers.seeding import seed

__all__ = [
    "barrier",
    "broadcast",
    "clip_grad_norm_",
    "consensus",
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
