"""`sherd run --hosts`: real launchers at the other end of a command that stands in for ssh."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from sherd.cli.launch.request import Showing
from sherd.cli.machines import attendance
from sherd.cli.machines.remote import Host, Remote, command_for
from sherd.cli.words import TOKEN
from sherd.comm.trust import seal
from tests.cli.scripts import notes, ranks_alive
from tests.helpers.processes import PATIENCE, SHERD, free_port, sherd, wait_for

pytestmark = pytest.mark.ranks

# As ssh does it: the words of the command become one string for a shell, in an environment that is not ours.
SSH = """#!/bin/sh
host=$1; shift
printf '%s\\n' "$*" > "command-$host"
[ "$host" = unreachable ] && { echo "ssh: no route to $host" >&2; exit 255; }
cd /
exec env -i PATH="$PATH" HOME=/ TMPDIR="$TMPDIR" sh -c "$*"
"""


@pytest.fixture
def ssh(here):
    file = here / "fake-ssh"
    file.write_text(SSH)
    file.chmod(0o755)
    return ["--ssh", str(file), "--master-addr", "127.0.0.1", "--master-port", str(free_port())]


def test_a_run_on_two_hosts(here, ssh, monkeypatch):
    monkeypatch.setenv("SHERD_SPIN", "0")
    (here / "about.py").write_text(
        "import hashlib, json, os, sys\n"
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GROUP_RANK', 'SHERD_STRATEGY', 'SHERD_SPIN')\n"
        "token = os.environ['SHERD_TOKEN']\n"
        "about = [*(os.environ[name] for name in names), len(token), hash(token) % 1, sys.argv[1:], os.getcwd()]\n"
        "about.append(hashlib.sha256(token.encode()).hexdigest()); about.append(sys.stdin.read())\n"
        "print(json.dumps(about)); print(token, file=open('token-' + os.environ['RANK'], 'w'))\n"
    )
    result = sherd("run", "--hosts", "a,me@b:2", *ssh, "--strategy", "zero1", "about.py", "it's; two words", "--n")
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.splitlines(), key=lambda line: json.loads(line[line.index('["') :])[0])
    assert [line[: line.index('["')] for line in lines] == ["", "[me@b rank 1] ", "[me@b rank 2] "]
    found = [json.loads(line[line.index('["') :]) for line in lines]
    assert [each[:4] for each in found] == [["0", "0", "3", "0"], ["1", "0", "3", "1"], ["2", "1", "3", "1"]]
    for each in found:
        assert each[4:10] == ["zero1", "0", 64, 0, ["it's; two words", "--n"], str(here)]
        assert each[10:] == [found[0][10], ""]  # the same token, and a standard input that is not ours
    token = (here / "token-0").read_text().strip()
    for command in here.glob("command-*"):
        assert token not in command.read_text()
    assert token not in result.stdout + result.stderr
    assert "sherd run on me@b: machine 1: ranks 1-2 of 3, over lo" in result.stderr
    assert "no SHERD_TOKEN" not in result.stderr


@contextlib.contextmanager
def ended(process):
    """A test that fails must not wait for it."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_ctrl_c_ends_all_hosts(here, ssh):
    command = [*SHERD, "run", "--hosts", "a,b", *ssh, str(here / "rank_script.py"), "sleep"]
    with ended(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)) as process:
        wait_for(lambda: len(notes(here)) == 2)
        assert len(ranks_alive(here)) == 2
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGINT
    assert ranks_alive(here) == []
    assert errors.endswith("sherd run: stopped by SIGINT; all hosts have ended\n")


def test_all_hosts_end_when_the_first_sherd_run_is_killed(here, ssh):
    command = [*SHERD, "run", "--hosts", "a,b", *ssh, str(here / "rank_script.py"), "sleep"]
    with ended(subprocess.Popen(command, stderr=subprocess.DEVNULL)) as process:
        wait_for(lambda: len(notes(here)) == 2)
        process.kill()
        process.wait()
    wait_for(lambda: ranks_alive(here) == [])


def test_a_host_that_cannot_be_reached_ends_the_others(here, ssh):
    result = sherd("run", "--hosts", "a,unreachable", *ssh, str(here / "rank_script.py"), "sleep")
    assert result.returncode == 255
    assert "ssh: no route to unreachable\n" in result.stderr
    assert "sherd run: ssh to unreachable failed, or the connection was lost (status 255)\n" in result.stderr


def test_hosts_that_all_fail_at_once_are_named(here, ssh):
    result = sherd("run", "--hosts", "unreachable", *ssh, str(here / "rank_script.py"))
    assert result.returncode == 255
    assert "sherd run: ssh to unreachable failed, or the connection was lost (status 255)\n" in result.stderr


def test_files_inside_the_events_directory_and_a_script_without_steps(here, ssh):
    inside = ["--events", "events", "--csv", "events/run.csv", "--log-dir", "events/logs"]
    result = sherd("run", "--hosts", "a,b", *ssh, *inside, str(here / "rank_script.py"))
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("no rank recorded a step") == 1
    assert len(list((here / "events" / "logs").iterdir())) == 2


def test_bad_input_of_a_host_has_its_name(here, ssh):
    result = sherd("run", "--hosts", "a", *ssh, "absent.py")
    assert result.returncode == 2
    assert result.stderr.startswith("sherd on a: the script 'absent.py' does not exist")


@pytest.mark.pure
def test_the_command_for_a_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(
        os,
        "environ",
        {TOKEN: "secret" * 4, "SHERD_TIMEOUT": "3", "HOME": "/root", "SHERD_HOST": "a", "OMP_NUM_THREADS": "1"},
    )
    monkeypatch.chdir(tmp_path)
    remote = Remote.of("[fd00::1]:3,b", 2, "ssh -p 22", None, None, 29500, 600, None)
    assert remote.hosts == [Host("[fd00::1]", 3), Host("b", 2)]
    assert (remote.ssh, remote.address, remote.token) == (["ssh", "-p", "22"], "fd00::1", "secret" * 4)
    showing = Showing(events=Path("runs/1"), quiet=True)
    command = command_for(remote, 1, ["train.py", "a b"], showing, "ddp", layers=True)
    words = "run --attended --ranks 2 --label b --wait 600 --nnodes 2 --node-rank 1 --master-addr fd00::1"
    assert f"{words} --master-port 29500 --events runs/1 --strategy ddp --layers --quiet train.py" in command
    assert f"cd {tmp_path} && exec env SHERD_TIMEOUT=3 OMP_NUM_THREADS=1 " in command
    assert "secret" not in command
    assert "HOME" not in command


@pytest.mark.pure
def test_the_token_has_one_name():
    assert TOKEN == seal.TOKEN == attendance.TOKEN
