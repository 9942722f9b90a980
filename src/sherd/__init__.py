"""sherd: train PyTorch models on many processes and machines by changing one line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sherd.config import CommOptions
from sherd.errors import (
    CodecFailed,
    CommClosed,
    CommError,
    ConfigError,
    Diverged,
    PeerLost,
    RankFailed,
    SherdError,
    TimedOut,
    Unsupported,
)

if TYPE_CHECKING:
    from sherd import comm

__version__ = "0.1.0"

__all__ = [
    "CodecFailed",
    "CommClosed",
    "CommError",
    "CommOptions",
    "ConfigError",
    "Diverged",
    "PeerLost",
    "RankFailed",
    "SherdError",
    "TimedOut",
    "Unsupported",
    "__version__",
    "comm",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use: `sherd --help` must not wait for it."""
    if name in ("comm",):
        return importlib.import_module(f"sherd.{name}")
    raise AttributeError(f"module 'sherd' has no attribute {name!r}")
