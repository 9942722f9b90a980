"""Ranks on this machine, started from Python: behind `sherd.launch` and `sherd.testing`.

The nouns: a *rank* is a process, seen from the caller; a *worker* is the same process, seen from inside; a *team* is
all ranks of a run. A `Start` creates the process of a rank: `fresh` starts new interpreters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sherd.ranks.launching import launch

__all__ = ["launch"]


def __getattr__(name: str) -> Any:
    """Import `launch` on first use: it needs torch, which takes seconds to import."""
    if name == "launch":
        from sherd.ranks.launching import launch

        return launch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
