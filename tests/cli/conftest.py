"""Where the commands of tests run."""

from __future__ import annotations

import contextlib
import os
import re
import signal

import pytest

from tests.cli.machines import Machines
from tests.cli.scripts import RANK, ranks_alive
from tests.helpers.hosts import hosts_or_skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with the script of a rank; runs start in it and put their temporary files below it."""
    (tmp_path / "rank_script.py").write_text(RANK)
    (tmp_path / "temporary").mkdir()
    for name in ("OMP_NUM_THREADS", "LOGLEVEL", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    left = ranks_alive(tmp_path)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == []
    # torch makes the directory of its compiler when it is imported.
    assert [path.name for path in (tmp_path / "temporary").iterdir() if "torchinductor" not in path.name] == []


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """`machines(2)`; where none can be made, a skip."""
    for name in list(os.environ):
        if re.match("RANK$|WORLD_SIZE|MASTER_|GLOO_|SHERD_|OMP_", name):
            monkeypatch.delenv(name)
    with contextlib.ExitStack() as stack:

        def make(count):
            found = Machines(stack.enter_context(hosts_or_skip(count)), tmp_path)
            stack.callback(found.close)
            return found

        yield make
