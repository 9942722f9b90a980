"""glibc's limits: keep memory that torch frees in the process, for the tensors of the next step.

Torch allocates new tensors in every step. The C library returns freed memory at the end of its heap to the
kernel, and large blocks at once, so each step pays for new pages, a fault for every 4 KB: FSDP2 on a GPT of 33.7 M
parameters took 30,000 faults a step, 8% of its time, most of them in the buffers that it makes for every collective.

The setting is for the whole process and costs up to `KEPT_BYTES` that no other process can use, so it is opt-in.
"""

from __future__ import annotations

import ctypes
import os
import sys

from sherd.config import flag_from_env

VARIABLE = "SHERD_KEEP_FREED_MEMORY"
KEPT_BYTES = 1 << 28
"""How much free memory at the end of the heap a rank may keep."""
_LARGEST_IN_HEAP = 1 << 25  # glibc's maximum; larger blocks get new pages every time

_DEFAULT = 1 << 17  # glibc's default for both, until a larger block is freed

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as <malloc.h> numbers them
_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")

RELIES_ON: dict[str, str | None] = {}
_raised = False


def install() -> None:
    """With `SHERD_KEEP_FREED_MEMORY=1`, raise glibc's limits for the whole process, unless the user has set them
    (`MALLOC_TRIM_THRESHOLD_` and others)."""
    if flag_from_env(VARIABLE, False) and not _chosen() and not _raised:
        _set_limits(KEPT_BYTES, _LARGEST_IN_HEAP, raised=True)


def uninstall() -> None:
    """Restore glibc's defaults. They no longer adapt after that, and glibc has no way to turn that on again."""
    if _raised:
        _set_limits(_DEFAULT, _DEFAULT, raised=False)


def return_freed() -> None:
    """Return memory that was freed to the kernel, wherever in the heap it is, where the C library can do that; not if
    it is to stay in the process."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None and not _raised and not _chosen():
        trim(0)


def _chosen() -> bool:
    """Whether the user has set glibc's limits."""
    return any(name in os.environ for name in _CHOICES) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")


def _set_limits(trim: int, mmap: int, raised: bool) -> None:
    """Set the limits if there are any: other allocators and C libraries do not have the call."""
    global _raised
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, trim)
        mallopt(_MMAP_THRESHOLD, mmap)
        _raised = raised
