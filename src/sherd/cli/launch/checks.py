"""Checks before the first rank starts: warnings, directories that must be writable, scripts that must parse."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from sherd.cli.launch.request import Showing
from sherd.cli.launch.variables import misspelt
from sherd.cli.options import cores
from sherd.errors import ConfigError

RANK_BYTES = 200 << 20  # private memory of a process that has imported torch, measured; the model is extra
CROWDED = 2  # ranks per core
MIB, GIB = 1 << 20, 1 << 30
CGROUP = Path("/sys/fs/cgroup")


def warnings_at_start(ranks: int) -> list[str]:
    """One line each."""
    found = misspelt(os.environ)
    if ranks > CROWDED * (here := cores()):
        found.append(
            f"{ranks} ranks on {here} core{'s' * (here > 1)} compete for them; -n auto starts one per core, at most 8"
        )
    if (available := available_memory()) < ranks * RANK_BYTES:
        needed = f"{ranks} ranks need {ranks * RANK_BYTES / GIB:.1f} GiB for torch alone"
        found.append(f"{needed}, and {available / GIB:.1f} GiB are free; the kernel may kill some")
    return found


def available_memory() -> int:
    """Free memory of the machine, or of the container if that has less."""
    import psutil

    available: int = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no limit reads as "max"
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        available = min(available, max(0, limit - used))
    return available


def check_directories(showing: Showing, machines: int) -> None:
    """Create the directories that were named, and refuse those that cannot be used."""
    if showing.needs_events and machines > 1 and showing.events is None:
        raise ConfigError(
            "--live, --csv and --tensorboard read the events of all ranks; with several machines also write "
            "--events DIR, a directory that all of them share"
        )
    if showing.events is not None:
        # Other machines may have written to a shared directory by now; only events show an earlier run.
        shared = machines > 1 or showing.attended
        make_directory(showing.events, "--events", unused="events-rank*.jsonl" if shared else "*")
    if showing.log_dir is not None:
        make_directory(showing.log_dir, "--log-dir")
    if showing.tensorboard is not None:
        make_directory(showing.tensorboard, "--tensorboard")
    if showing.csv is not None:
        _check_file(showing.csv, "--csv")


def make_directory(directory: Path, option: str, unused: str = "") -> None:
    """Create the directory that an option names; refuse one that cannot be used or has files of pattern `unused`."""
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
        words = f"{option} {str(file)!r} cannot be written ({error.strerror}); name a file in a directory you can write"
        raise ConfigError(words) from None
    if file.stat().st_size:
        raise ConfigError(f"{option} {str(file)!r} is not empty; name a new file for every run")


def _useless(directory: Path, option: str, why: str | None) -> str:
    return f"{option} {str(directory)!r} cannot be written ({why}); name a directory you can write"


# ---------------------------------------------------------------- scripts and modules; nothing is imported


def check_syntax(script: Path) -> None:
    try:
        source = script.read_bytes()
        if b"\0" in source:  # an archive, or compiled code
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks warn themselves
            compile(source, script, "exec", dont_inherit=True)
    except OSError as error:
        raise ConfigError(f"the script {str(script)!r} cannot be read ({error.strerror})") from None
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        found = f": {error.text.strip()}" if error.text else ""
        raise ConfigError(f"the script {str(script)!r} is not valid Python: {where}{error.msg}{found}") from None


def check_module(name: str) -> None:
    spec = None
    parts = name.split(".")
    places: Sequence[str] | None = [os.curdir, *sys.path]
    for number in range(1, len(parts) + 1):
        spec = _found(".".join(parts[:number]), places) if places is not None else None
        if spec is None:
            raise ConfigError(f"there is no module {name!r}, neither here nor installed; write -m package.module")
        places = spec.submodule_search_locations
    if places is not None and not _found(f"{name}.__main__", places):
        raise ConfigError(f"{name!r} is a package without a __main__; write one of its modules, -m {name}.module")


def _found(name: str, places: Sequence[str]) -> ModuleSpec | None:
    """On the path; else by other finders, such as those of editable installs."""
    if spec := PathFinder.find_spec(name, list(places)):
        return spec
    for finder in sys.meta_path:
        if finder is not PathFinder and (find := getattr(finder, "find_spec", None)):
            found: ModuleSpec | None = find(name, None if "." not in name else list(places))
            if found:
                return found
    return None
