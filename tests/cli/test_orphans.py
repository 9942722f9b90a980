"""Ranks end with `sherd run`, however it ends, and are otherwise what they would be without it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sherd.cli.launch import tied
from sherd.cli.launch.stopping import STOPPING
from tests.cli.scripts import notes, ranks_alive, two_ranks_that_sleep
from tests.helpers.processes import SHERD, sherd, wait_for

pytestmark = pytest.mark.ranks


def test_ranks_end_when_the_launcher_is_killed_whatever_they_and_it_ignore(here):
    with two_ranks_that_sleep(here, "SIGTERM", "SIGHUP", "SIGINT", under=["nohup"]) as process:
        status = Path(f"/proc/{process.pid}/status").read_text()
        ignored = int(re.search(r"^SigIgn:\s*(\w+)", status, flags=re.MULTILINE)[1], 16)
        assert ignored & 1 << signal.SIGHUP - 1, "under nohup a run outlives its terminal"
        assert not ignored & 1 << signal.SIGTERM - 1
        process.kill()
        process.wait()
        wait_for(lambda: ranks_alive(here) == [], seconds=20)


def test_ranks_end_when_the_launcher_is_killed_while_it_starts_them(here):
    """From the first one on: a rank may ask for its launcher's death after that."""
    with subprocess.Popen([*SHERD, "run", "-n", "8", "rank_script.py", "sleep"]) as process:
        wait_for(lambda: psutil.Process(process.pid).children())
        ranks = psutil.Process(process.pid).children()
        process.kill()
    assert psutil.wait_procs(ranks, timeout=20)[1] == []
    wait_for(lambda: ranks_alive(here) == [], seconds=20)


def test_a_rank_whose_launcher_is_gone_does_not_begin(here):
    done = subprocess.run(
        [sys.executable, "-I", "-S", tied.__file__, str(os.getppid()), sys.executable, "rank_script.py"], check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert notes(here) == []


ABOUT = """
import json, os, re, signal, sys
status = open("/proc/self/status").read()
masks = re.findall(r"^(Sig(?:Ign|Blk|Cgt)):\\s*(\\w+)", status, flags=re.MULTILINE)
about = {"argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags), "masks": masks}
about |= {"files": len(os.listdir("/proc/self/fd")), "leader": os.getsid(0) == os.getpid()}
about |= {"variables": sorted(os.environ), "parent": os.getppid()}
print(json.dumps(about))
"""


def test_a_rank_is_what_python_alone_would_start(here):
    (here / "about.py").write_text(ABOUT)
    rest = {"capture_output": True, "check": True, "preexec_fn": _ignore_nothing}
    command = ["about.py", "--an option", ""]
    under_sherd = json.loads(subprocess.run([*SHERD, "run", *command], **rest).stdout)
    alone = json.loads(subprocess.run([sys.executable, "-u", *command], start_new_session=True, **rest).stdout)
    for name in ("argv", "orig_argv", "path", "flags", "masks", "files", "leader"):
        assert under_sherd[name] == alone[name], name
    added = set(under_sherd["variables"]) - set(alone["variables"])
    assert {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SHERD_TOKEN"} <= added
    assert "TORCH_CPP_LOG_LEVEL" not in added


def _ignore_nothing():
    """Who runs tests in the background ignores signals, which commands inherit."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)


def test_what_a_failed_rank_started_ends_with_it(here):
    script = "import os, subprocess, sys; subprocess.Popen(['sleep', '61234']); os.kill(os.getpid(), 9)"
    (here / "left.py").write_text(script)
    before = set(_sleepers())
    assert sherd("run", "left.py").returncode == 128 + signal.SIGKILL
    wait_for(lambda: set(_sleepers()) <= before, seconds=20)


def _sleepers():
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes() == b"sleep\x0061234\x00":
                yield process.name
        except OSError:
            continue
