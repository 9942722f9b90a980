"""Whether a script or a module can be started at all: every rank would say the same otherwise. Nothing is imported."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from sherd.errors import ConfigError


def check_syntax(script: Path) -> None:
    try:
        source = script.read_bytes()
        if b"\0" in source:  # an archive, or compiled already
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
            raise ConfigError(f"there is no module {name!r} here or among the installed ones; write -m package.module")
        places = spec.submodule_search_locations
    if places is not None and not _found(f"{name}.__main__", places):
        raise ConfigError(f"{name!r} is a package without a __main__; write one of its modules, -m {name}.module")


def _found(name: str, places: Sequence[str]) -> ModuleSpec | None:
    """On the path; else by the finders of packages that are installed in another way."""
    if spec := PathFinder.find_spec(name, list(places)):
        return spec
    for finder in sys.meta_path:
        if finder is not PathFinder and (find := getattr(finder, "find_spec", None)):
            found: ModuleSpec | None = find(name, None if "." not in name else list(places))
            if found:
                return found
    return None
