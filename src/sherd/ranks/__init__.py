"""Ranks of this machine, started from Python: behind `sherd.launch` and `sherd.testing`.

The nouns: a *rank* is a process, seen from the caller; a *worker* is the same process, seen from inside; a *team* is
all ranks of a run. How the process of a rank comes into being is left to a `Start`: `fresh` has new interpreters.
"""

from __future__ import annotations

from sherd.ranks.launching import launch

__all__ = ["launch"]
