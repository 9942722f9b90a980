"""How ranks share the work: one file per strategy, a small base class, and a registry of their names."""

from __future__ import annotations

from sherd.strategies.base import Strategy
from sherd.strategies.ddp import DDP
from sherd.strategies.gossip import Gossip
from sherd.strategies.local import Local
from sherd.strategies.registry import chosen, default, names, register, resolve
from sherd.strategies.zero import ZeRO

__all__ = ["DDP", "Gossip", "Local", "Strategy", "ZeRO", "chosen", "default", "names", "register", "resolve"]
