"""Machines on which ranks cannot run, or could not without care: one clear line at once, or no difference."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest

from sherd import machine
from tests.helpers import processes

pytestmark = pytest.mark.ranks

CONNECT = "from sherd import comm\nwith comm.connect() as ranks: print(f'{ranks.world}\\n', end='')\n"
LAUNCH = """
import sherd
try:
    print(sherd.launch(lambda: 7, 2))
except sherd.SherdError as error:
    print(f"{type(error).__name__}: {error}")
"""
COMMANDS = {
    "run": ["-m", "sherd.cli", "run", "-n", "2", "script.py"],
    "doctor": ["-m", "sherd.cli", "doctor", "--json"],
    "launch": ["launch.py"],
}
FEW_FILES = ["sh", "-c", 'ulimit -n 24 && exec "$@"', "sh"]
LOOPBACK_DOWN = ["unshare", "--net"]
READ_ONLY = (
    'for d in /tmp /var/tmp /dev/shm "$1"; do mount --bind $d $d && mount -o remount,ro,bind $d || exit 99; done'
)
NO_TEMPORARY_FILES = ["unshare", "--mount", "sh", "-c", f'{READ_ONLY}; shift; cd /proc && exec "$@"', "sh"]


@pytest.fixture
def on(here, monkeypatch):
    """Run one of the commands on a machine that is bad in this way."""
    (here / "script.py").write_text(CONNECT)
    (here / "launch.py").write_text(LAUNCH)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def run(badness, name):
        command = [sys.executable, *COMMANDS[name]]
        command[-1] = str(here / command[-1]) if name != "doctor" else command[-1]
        if (
            badness[0] == "unshare"
            and subprocess.run([*badness[:2], "true"], check=False, capture_output=True).returncode
        ):
            pytest.skip("namespaces cannot be made here; they need root")
        if badness is NO_TEMPORARY_FILES:
            badness = [*badness, str(here)]
        return processes.run(*badness, *command)

    return run


FEW = "a process may open 24 files on this machine, and 2 ranks need about 56 in each; write `ulimit -n 1024` before"
DOWN = "this machine does not reach itself at 127.0.0.1 (Network is unreachable), which ranks need"


@pytest.mark.parametrize(("badness", "words"), [(FEW_FILES, FEW), (LOOPBACK_DOWN, DOWN)])
def test_run_says_what_is_wrong(on, badness, words):
    result = on(badness, "run")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"sherd: {words}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(("badness", "words"), [(FEW_FILES, FEW), (LOOPBACK_DOWN, DOWN)])
def test_launch_says_what_is_wrong(on, badness, words):
    result = on(badness, "launch")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Unsupported: {words}")


def test_doctor_says_what_is_wrong(on):
    few, down = (json.loads(on(badness, "doctor").stdout) for badness in (FEW_FILES, LOOPBACK_DOWN))
    assert (few["open_files"], few["loopback"]) == (24, True)
    assert down["loopback"] is False
    assert DOWN in down["loopback_problem"]


def test_nothing_needs_a_temporary_directory(on):
    result = on(NO_TEMPORARY_FILES, "run")
    assert (result.returncode, sorted(result.stdout.splitlines()), result.stderr) == (0, ["2", "[rank 1] 2"], "")
    assert on(NO_TEMPORARY_FILES, "launch").stdout == "[7, 7]\n"


def test_a_limit_that_may_be_raised_is(monkeypatch):
    limits, hard = [(24, 4096)], 4096
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, limit: limits.append(limit))
    machine.check_files(2)
    machine.check_files(8)
    assert limits == [(24, hard), (hard, hard)]
    limits[:] = [(1024, resource.RLIM_INFINITY)]
    machine.check_files(2000)
    assert limits[-1] == (machine.MOST_FILES, resource.RLIM_INFINITY)


def test_ranks_that_others_start_say_at_once_that_they_may_open_too_few_files():
    script = f"ulimit -n 24; exec {sys.executable} -c 'from sherd import comm; comm.connect()'"
    started = []
    for rank in (0, 1):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(["sh", "-c", script], env={**os.environ, **variables}, stderr=pipe, text=True))
    for process in started:
        assert "Unsupported: a process may open 24 files" in process.communicate(timeout=100)[1]
