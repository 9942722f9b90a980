"""sherd: train PyTorch models on many processes and machines by changing one line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sherd.config import CommOptions, LoaderOptions, StepOptions
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
from sherd.registration import register as _register

if TYPE_CHECKING:
    from sherd import comm, observe
    from sherd.api import clip_grad_norm_, describe, distribute, full_grad, full_parameters, no_sync, weigh
    from sherd.api.log import log
    from sherd.ranks import launch
    from sherd.strategies import DDP, Strategy, ZeRO

__version__ = "0.1.0"

_LAZY = {
    **dict.fromkeys(
        ("clip_grad_norm_", "describe", "distribute", "full_grad", "full_parameters", "log", "no_sync", "weigh"),
        "sherd.api",
    ),
    "launch": "sherd.ranks",
    **dict.fromkeys(("DDP", "Strategy", "ZeRO"), "sherd.strategies"),
}

__all__ = [
    "DDP",
    "CodecFailed",
    "CommClosed",
    "CommError",
    "CommOptions",
    "ConfigError",
    "Diverged",
    "LoaderOptions",
    "PeerLost",
    "RankFailed",
    "SherdError",
    "StepOptions",
    "Strategy",
    "TimedOut",
    "Unsupported",
    "ZeRO",
    "__version__",
    "clip_grad_norm_",
    "comm",
    "describe",
    "distribute",
    "full_grad",
    "full_parameters",
    "launch",
    "log",
    "no_sync",
    "observe",
    "weigh",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use: `sherd --help` must not wait for it."""
    if name in ("comm", "observe"):
        return importlib.import_module(f"sherd.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'sherd' has no attribute {name!r}")


_register()
