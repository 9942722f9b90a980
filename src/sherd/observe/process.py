"""This machine, and this process's memory on it."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from pathlib import Path

RESIDENT_SECONDS = 1.0
"""How often to ask the kernel: it sums over the whole address space, which takes 50 us or more."""
_FIELDS = {b"RssAnon:": "private", b"RssShmem:": "shared"}
_SECRET = re.compile(r"(?:^|[-_.])(?:api)?(?:token|key|secret|passw(?:or)?d|credentials?)(?:$|[-_.])", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
MASK = "***"


def machine() -> dict[str, str | int | None]:
    """What the figures of a run depend on."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "platform": platform.platform(),
        "sherd": _version("sherd"),
    }


def command() -> list[str]:
    """The command line of this process. Values of options that are named like a secret are masked."""
    found: list[str] = []
    mask_next = False
    for word in sys.argv:
        name, equals, _ = word.partition("=")
        secret = bool(_SECRET.search(_CAMEL.sub("-", name)))
        if mask_next and not word.startswith("-"):
            found.append(MASK)
        else:
            found.append(f"{name}={MASK}" if secret and equals else word)
        mask_next = secret and not equals and word.startswith("-")
    return found


def _version(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__version__", None)  # not imported here: readers do not need torch


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Processor")))
    return next(names, "") or platform.processor() or platform.machine()


class Resident:
    """Resident bytes of this process: private, and of shared mappings that it has touched."""

    def __init__(self) -> None:
        self._due = 0.0
        self._found: dict[str, int] | None = None

    def read(self) -> dict[str, int] | None:
        """The value, at most a second old; None if the kernel does not report it."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + RESIDENT_SECONDS
            self._found = _resident()
        return self._found


def _resident() -> dict[str, int] | None:
    try:
        file = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        text = os.read(file, 4096)
    finally:
        os.close(file)
    found = {}
    for field, name in _FIELDS.items():
        _, there, rest = text.partition(field)
        if not there:
            return None
        found[name] = 1024 * int(rest.split(None, 1)[0])
    return found
