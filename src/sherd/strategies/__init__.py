"""How ranks share the work: one file per strategy, a small base class, and a registry of their names."""

from __future__ import annotations

from sherd.strategies.base import Strategy
from sherd.strategies.registry import names, register, resolve

__all__ = ["Strategy", "names", "register", "resolve"]
