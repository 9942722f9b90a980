"""This machine, and this process's memory on it."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

RESIDENT_SECONDS = 1.0
"""How often the kernel is asked: it adds up the whole address space for an answer, 50 us or more."""
_FIELDS = {"RssAnon": "private", "RssShmem": "shared"}


def machine() -> dict[str, str | int | None]:
    """What a run's figures depend on."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "platform": platform.platform(),
        "sherd": _version("sherd"),
    }


def _version(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__version__", None)  # not imported for this: readers need no torch


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Processor")))
    return next(names, "") or platform.processor() or platform.machine()


class Resident:
    """Bytes of this process in memory: its own, and those of shared mappings that it has touched."""

    def __init__(self) -> None:
        self._due = 0.0
        self._found: dict[str, int] | None = None

    def read(self) -> dict[str, int] | None:
        """What it was when last asked, at most a second ago; None where the kernel does not tell."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + RESIDENT_SECONDS
            self._found = _resident()
        return self._found


def _resident() -> dict[str, int] | None:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in text.splitlines() if line.startswith(tuple(_FIELDS)))
    if len(found) < len(_FIELDS):
        return None
    return {name: 1024 * int(found[field].split()[0]) for field, name in _FIELDS.items()}
