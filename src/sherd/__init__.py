"""sherd: train PyTorch models on many processes and machines by changing one line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sherd.config import CommOptions, LoaderOptions, LossScale, StepOptions
from sherd.errors import (
    ChunkFailed,
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
from sherd.patches.process import backend_import as _backend_import

if TYPE_CHECKING:
    from sherd import comm, observe, optim, strategies
    from sherd.api import (
        barrier,
        broadcast,
        clip_grad_norm_,
        consensus,
        describe,
        distribute,
        full_grad,
        full_parameters,
        gather,
        is_main,
        main_first,
        mean,
        no_sync,
        print,
        progress,
        rank,
        seed,
        weigh,
        world,
    )
    from sherd.api.helpers.log import log
    from sherd.mapreduce import evaluate, map_reduce
    from sherd.ranks import launch
    from sherd.strategies import DDP, DiLoCo, Gossip, LocalSGD, Strategy, ZeRO

__version__ = "0.1.0"

_LAZY = {
    **dict.fromkeys(
        ("clip_grad_norm_", "consensus", "describe", "distribute", "full_grad", "full_parameters"), "sherd.api"
    ),
    **dict.fromkeys(("log", "no_sync", "weigh"), "sherd.api"),
    **dict.fromkeys(("barrier", "broadcast", "gather", "is_main", "main_first", "mean", "print"), "sherd.api"),
    **dict.fromkeys(("progress", "rank", "seed", "world"), "sherd.api"),
    "launch": "sherd.ranks",
    **dict.fromkeys(("evaluate", "map_reduce"), "sherd.mapreduce"),
    **dict.fromkeys(("DDP", "DiLoCo", "Gossip", "LocalSGD", "Strategy", "ZeRO"), "sherd.strategies"),
}

__all__ = [
    "DDP",
    "ChunkFailed",
    "CodecFailed",
    "CommClosed",
    "CommError",
    "CommOptions",
    "ConfigError",
    "DiLoCo",
    "Diverged",
    "Gossip",
    "LoaderOptions",
    "LocalSGD",
    "LossScale",
    "PeerLost",
    "RankFailed",
    "SherdError",
    "StepOptions",
    "Strategy",
    "TimedOut",
    "Unsupported",
    "ZeRO",
    "__version__",
    "barrier",
    "broadcast",
    "clip_grad_norm_",
    "comm",
    "consensus",
    "describe",
    "distribute",
    "evaluate",
    "full_grad",
    "full_parameters",
    "gather",
    "is_main",
    "launch",
    "log",
    "main_first",
    "map_reduce",
    "mean",
    "no_sync",
    "observe",
    "optim",
    "print",
    "progress",
    "rank",
    "seed",
    "strategies",
    "weigh",
    "world",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use: `sherd --help` must not wait for it."""
    if name in ("comm", "observe", "optim", "strategies"):
        return importlib.import_module(f"sherd.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'sherd' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What there is to use, though most of it is not imported yet: for `sherd.<TAB>`."""
    return sorted(__all__)


_backend_import.install("sherd.comm.backend")
