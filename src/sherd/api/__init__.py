"""What a user calls: `distribute`, and what can be said about a distributed model afterwards.

Read `training` first: a whole step on one screen. A call of `distribute` is a `plan`, on which ranks agree `together`,
and its `carrying_out`.
"""

from __future__ import annotations

from sherd.api.distribution import distribute
from sherd.api.functions import clip_grad_norm_, describe, full_grad, full_parameters, no_sync, weigh
from sherd.api.log import log

__all__ = ["clip_grad_norm_", "describe", "distribute", "full_grad", "full_parameters", "log", "no_sync", "weigh"]
