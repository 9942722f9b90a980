"""Ranks of this machine, started from Python: behind `sherd.launch` and `sherd.testing`.

The nouns: a *rank* is a process, seen from the caller; a *worker* is the same process, seen from inside; a *team* is
all ranks of a run. How the process of a rank comes into being is left to a `Start`: `fresh` has new interpreters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sherd.ranks.launching import launch

__all__ = ["launch"]


def __getattr__(name: str) -> Any:
    """Late: `machine` is wanted by those who have not imported torch yet, which takes seconds."""
    if name == "launch":
        from sherd.ranks.launching import launch

        return launch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
