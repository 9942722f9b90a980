"""How ranks share the work: one file per strategy, a small base class, and a registry of their names."""

from __future__ import annotations

from sherd.strategies.base import Strategy
from sherd.strategies.ddp import DDP
from sherd.strategies.diloco import DiLoCo
from sherd.strategies.gossip import Gossip
from sherd.strategies.local import Local
from sherd.strategies.local_sgd import LocalSGD
from sherd.strategies.registry import chosen, default, names, register, resolve
from sherd.strategies.zero import ZeRO

__all__ = [
    "DDP",
    "DiLoCo",
    "Gossip",
    "Local",
    "LocalSGD",
    "Strategy",
    "ZeRO",
    "chosen",
    "default",
    "names",
    "register",
    "resolve",
]
