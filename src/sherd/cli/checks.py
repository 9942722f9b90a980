"""What is looked at before the first rank starts: directories that must be writable, and what deserves a warning."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sherd.cli.options import cores
from sherd.cli.request import Showing
from sherd.cli.variables import misspelt
from sherd.errors import ConfigError

RANK_BYTES = 200 << 20  # private memory of a process that has imported torch, measured; the model comes on top
CROWDED = 2  # ranks per core
MIB, GIB = 1 << 20, 1 << 30
CGROUP = Path("/sys/fs/cgroup")


def warnings_at_start(ranks: int) -> list[str]:
    """One line each."""
    found = misspelt(os.environ)
    if ranks > CROWDED * (here := cores()):
        found.append(
            f"{ranks} ranks on {here} core{'s' * (here > 1)} take turns; -n auto starts one per core, at most 8"
        )
    if (available := available_memory()) < ranks * RANK_BYTES:
        needed = f"{ranks} ranks need {ranks * RANK_BYTES / GIB:.1f} GiB for torch alone"
        found.append(f"{needed}, and {available / GIB:.1f} GiB are free; the kernel may kill some")
    return found


def available_memory() -> int:
    """Of the machine, or of the container if that has less."""
    import psutil

    available: int = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no limit reads as "max"
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        available = min(available, max(0, limit - used))
    return available


def check_directories(showing: Showing, machines: int) -> None:
    """Make the directories that were named, and refuse those that cannot be used."""
    if showing.needs_events and machines > 1 and showing.events is None:
        raise ConfigError(
            "--live, --csv and --tensorboard read the events of all ranks; with several machines write --events DIR as "
            "well, a directory that all of them share"
        )
    if showing.events is not None:
        # Of a directory that machines share, others may have made use by now: of an earlier run there are events.
        shared = machines > 1 or showing.attended
        make_directory(showing.events, "--events", unused="events-rank*.jsonl" if shared else "*")
    if showing.log_dir is not None:
        make_directory(showing.log_dir, "--log-dir")
    if showing.tensorboard is not None:
        make_directory(showing.tensorboard, "--tensorboard")
    if showing.csv is not None:
        _check_file(showing.csv, "--csv")


def make_directory(directory: Path, option: str, unused: str = "") -> None:
    """Make the directory that an option names, and refuse one that cannot be used or has files of this pattern."""
    if directory.is_file():
        raise ConfigError(f"{option} {str(directory)!r} is a file; name a directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(_useless(directory, option, error.strerror)) from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(_useless(directory, option, "permission denied"))
    if unused and any(directory.glob(unused)):
        raise ConfigError(f"{option} {str(directory)!r} is not empty; name a new directory for every run")


def _check_file(file: Path, option: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab"):
            pass
    except OSError as error:
        words = f"{option} {str(file)!r} cannot be written ({error.strerror}); name a file in a directory of yours"
        raise ConfigError(words) from None
    if file.stat().st_size:
        raise ConfigError(f"{option} {str(file)!r} is not empty; name a new file for every run")


def _useless(directory: Path, option: str, why: str | None) -> str:
    return f"{option} {str(directory)!r} cannot be written ({why}); name a directory of yours"
