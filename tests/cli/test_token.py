"""The token of a run, and that a run on one machine can be reached from nowhere else."""

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

import sherd as library
from sherd.cli.machines.token import set_token
from sherd.errors import ConfigError
from tests.helpers.processes import SHERD, sherd, wait_for

pytestmark = pytest.mark.ranks

TELL = """
import json, os
names = ("SHERD_TOKEN", "GLOO_SOCKET_IFNAME")
print(json.dumps([os.environ.get(name) for name in names]) + "\\n", end="")  # in one piece
"""


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    for name in ("SHERD_TOKEN", "SHERD_TOKEN_FILE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def token_of_two_ranks(*options):
    """Which must be one."""
    result = sherd("run", "-n", "2", *options, "tell.py")
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    lines = [line.removeprefix("[rank 1] ") for line in result.stdout.splitlines()]
    found, interfaces = zip(*map(json.loads, lines), strict=True)
    assert len(set(found)) == 1
    assert set(interfaces) == {"lo"}
    return found[0]


def test_every_run_on_one_machine_has_a_new_one(here):
    (here / "tell.py").write_text(TELL)
    first, second = token_of_two_ranks(), token_of_two_ranks()
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert first != second


@pytest.mark.pure
def test_the_users_own_is_kept(here, monkeypatch):
    def token(file=None, machines=1):
        with monkeypatch.context() as inside:
            inside.setenv("SHERD_TOKEN", os.environ.get("SHERD_TOKEN", ""))  # what is set there goes with the context
            seal = set_token(file, machines)
            assert (seal is None) == (os.environ["SHERD_TOKEN"] == "")
            return os.environ["SHERD_TOKEN"]

    assert token(machines=2) == ""
    assert len(token()) == 64
    (here / "token").write_text("from a file named by an option\n")
    (here / "other").write_text("from a file named by a variable\n")
    monkeypatch.setenv("SHERD_TOKEN_FILE", "other")
    assert token() == token(machines=2) == "from a file named by a variable"
    monkeypatch.setenv("SHERD_TOKEN", "from the environment")
    assert token() == token(machines=2) == "from the environment"
    assert token("token") == token("token", 2) == "from a file named by an option"


@pytest.mark.pure
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"--token-file 'token' cannot be read \(No such file or directory\); write the path of a file"),
        ("\n", r"--token-file 'token' is empty; write at least 16 random characters into it"),
        ("hunter2", r"the token in SHERD_TOKEN has 7 characters, which can be guessed"),
    ],
)
def test_a_token_that_cannot_be_used(here, monkeypatch, content, words):
    monkeypatch.setenv("SHERD_TOKEN", "")  # what is set goes with the test
    if content is not None:
        (here / "token").write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        set_token("token", machines=1)
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_launch_gives_its_ranks_one_too(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    found = library.launch(lambda: os.environ["SHERD_TOKEN"], 2)
    assert len(set(found)) == 1
    assert re.fullmatch("[0-9a-f]{64}", found[0])


GLOO = """
import pathlib, time, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
pathlib.Path(f"there-{dist.get_rank()}").touch()
time.sleep(600)
"""


def test_on_one_machine_all_sockets_are_on_loopback_and_the_token_in_no_command(here):
    (here / "gloo.py").write_text(GLOO)
    with subprocess.Popen([*SHERD, "run", "-n", "2", "gloo.py"], stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: len(list(here.glob("there-*"))) == 2)
            launcher = psutil.Process(process.pid)
            ranks = launcher.children()
            listening = [
                (each.laddr.ip, one.pid)
                for one in (launcher, *ranks)
                for each in one.net_connections("inet")
                if each.status == psutil.CONN_LISTEN
            ]
            token = ranks[0].environ()["SHERD_TOKEN"]
            commands = [Path(f"/proc/{one.pid}/cmdline").read_text() for one in (launcher, *ranks)]
        finally:
            process.send_signal(signal.SIGTERM)
    assert {pid for _, pid in listening} == {one.pid for one in (launcher, *ranks)}
    assert {ip for ip, _ in listening} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert not [command for command in commands if token in command]
    assert len(ranks) == 2
    assert sys.executable in commands[1]
