"""glibc's limits: keeps memory that torch frees in the process, for the tensors of the next step.

Torch allocates the tensors of every step anew. The C library hands freed memory at the end of its heap back to the
kernel, and large blocks at once, so each step pays for new pages, a fault for every 4 KB: FSDP2 on a GPT of 33.7 M
parameters took 30,000 faults a step, 8% of its time, most of them in the buffers that it makes for every collective.

It is a setting of the whole process and has its price, up to `KEPT_BYTES` that nobody else gets: only for who asks.
"""

from __future__ import annotations

import ctypes
import os
import sys

from sherd.config import flag_from_env

VARIABLE = "SHERD_KEEP_FREED_MEMORY"
KEPT_BYTES = 1 << 28
"""How much free memory at the end of the heap a rank may keep."""
_LARGEST_IN_HEAP = 1 << 25  # glibc takes no more; what is larger has pages of its own, every time

_DEFAULT = 1 << 17  # glibc's own for both, until it sees a larger block freed

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as <malloc.h> numbers them
_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")

RELIES_ON: dict[str, str | None] = {}
_raised = False


def install() -> None:
    """Where `SHERD_KEEP_FREED_MEMORY=1`, raise glibc's limits for the whole process, unless the user has set them
    (`MALLOC_TRIM_THRESHOLD_` and others)."""
    chosen = any(name in os.environ for name in _CHOICES) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if flag_from_env(VARIABLE, False) and not chosen and not _raised:
        _set_limits(KEPT_BYTES, _LARGEST_IN_HEAP, raised=True)


def uninstall() -> None:
    """Put them back to what they are by default. glibc no longer raises them by itself then, and has no way to."""
    if _raised:
        _set_limits(_DEFAULT, _DEFAULT, raised=False)


def _set_limits(trim: int, mmap: int, raised: bool) -> None:
    """An allocator that was put in glibc's place has none, and other C libraries do not know the call."""
    global _raised
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, trim)
        mallopt(_MMAP_THRESHOLD, mmap)
        _raised = raised
