"""Uninstalling every patch leaves torch and Python as they were before `import sherd`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sherd import patches

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]

PROGRAM = str(Path(__file__).with_name("unpatched_program.py"))


@pytest.mark.ranks
@pytest.mark.parametrize("launcher", [(), ("-m", "sherd", "run", "-n", "2")], ids=["alone", "two ranks"])
def test_everything_is_as_it_was(launcher, tmp_path):
    environment = {**os.environ, "SHERD_EVENTS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *launcher, PROGRAM], capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as before") == (2 if launcher else 1), done.stdout


def test_the_list_is_complete():
    folder = ROOT / "src/sherd/patches"
    files = [path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py") if path.stem != "__init__"]
    found = {".".join(file.parts) for file in files} - {"replacing"}
    assert found == set(patches.PATCHES) and len(set(patches.PATCHES)) == len(patches.PATCHES)
    for name in patches.PATCHES:
        patch = patches.patch(name)
        assert callable(patch.install) and callable(patch.uninstall) and isinstance(patch.RELIES_ON, dict)


def test_nothing_is_replaced_elsewhere():
    """Assignments to attributes of torch's and Python's modules, and to classes of objects, are in that folder only."""
    source = ROOT / "src/sherd"
    pattern = re.compile(
        r"^\s*(?:torch|nn|optim|dist|sys|os|builtins|pickle|copyreg|ForkingPickler|LRScheduler)\.[\w.]+ = "
        r"|\.__class__ = |ForkingPickler\.register\(|register_optimizer_step_|register_module_"
        r"|setattr\((?:torch|nn|optim|dist|kind|owner|place|module)\b|mallopt\(|meta_path\.insert",
        re.MULTILINE,
    )
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if not path.is_relative_to(source / "patches") and pattern.search(path.read_text())
    }
    # Handles of ours are timed, once a run is recorded: no class of torch's.
    assert found == {"comm/handle.py"}


def test_the_table_names_every_patch():
    text = (ROOT / "docs/patches.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)
    assert rows == list(patches.PATCHES)
