"""Whether each rank of a host has a core to itself."""

from __future__ import annotations

import os
from pathlib import Path

from sherd.config import flag_from_env

_CGROUPS = Path("/sys/fs/cgroup")


def spins_pay(ranks: int) -> bool:
    """Spinning helps only while every rank has a core of its own. SHERD_SPIN=0 says that others need the cores."""
    return flag_from_env("SHERD_SPIN", True) and ranks <= cores()


def cores(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process may run on, or fewer where its container may use less time than they have."""
    allowed = len(os.sched_getaffinity(0))
    try:
        paths = [line.split(":", 2)[2] for line in own.read_text().splitlines() if line.startswith("0::")]
    except OSError:
        paths = []
    for path in paths or [""]:
        here = root / path.strip("/")
        for group in (here, *here.parents):
            if group.is_relative_to(root):
                allowed = min(allowed, _quota(group, allowed))
    return max(min(allowed, _old_quota(root / "cpu", allowed)), 1)


def _quota(group: Path, otherwise: int) -> int:
    """Whole cores' worth of time that a control group allows, by the second version of their interface."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return otherwise if quota == "max" else int(quota) // int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return otherwise


def _old_quota(group: Path, otherwise: int) -> int:
    """The same by the first version, where -1 is no limit."""
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        return otherwise if quota < 0 else quota // int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return otherwise
