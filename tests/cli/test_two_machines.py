"""README's commands for two machines, on machines as they are installed: their own names lead to loopback."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sherd.testing import _namespaces
from tests.cli.machines import NAMES, finished, lines_until
from tests.helpers.processes import PATIENCE

TRAIN = """
import os, torch, torch.distributed as dist
from sherd import comm
with comm.connect() as ranks:
    total = ranks.all_reduce(torch.full((1000,), float(ranks.rank))).wait()
dist.barrier()
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GLOO_SOCKET_IFNAME")
words = [*(os.environ[name] for name in names), str(int(total[0])), str("SHERD_TOKEN" in os.environ)]
print(" ".join(words) + "\\n", end="")  # in one piece
"""


@pytest.fixture
def two(machines, tmp_path):
    (tmp_path / "script.py").write_text(TRAIN)
    return machines(2)


def both(machines, *arguments, address="host-a", ranks=2, **variables):
    """README's two commands."""
    meeting = ["--nnodes", "2", "--master-addr", address]
    return [
        machines.run(number, *meeting, "--node-rank", str(number), "-n", str(ranks), *arguments, **variables)
        for number in (0, 1)
    ]


def by_rank(stdout):
    """Lines of all ranks, without what stands before them."""
    return sorted(re.sub(r"^\[rank \d+\] ", "", line) for line in stdout.splitlines())


def test_the_two_commands_of_the_readme(two, tmp_path):
    token = secrets.token_hex(32)
    (tmp_path / "token").write_text(f"{token}\n")
    results = finished(both(two, "--token-file", "token", "script.py"))
    assert [status for *_, status in results] == [0, 0], results
    for number, (stdout, stderr, _) in enumerate(results):
        first = 2 * number
        assert by_rank(stdout) == [f"{r} {r - first} 4 2 {number} eth0 6 True" for r in (first, first + 1)]
        # torch warns of addresses without a name; sherd has one line.
        said = re.findall("^sherd run: .*", stderr, flags=re.MULTILINE)
        assert said == [f"sherd run: machine {number}: ranks {first}-{first + 1} of 4, over eth0 (10.0.0.{number + 2})"]
        assert token not in stderr


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.fuzz)])
def test_ranks_that_others_start_find_the_interface_too(two, torchrun):
    """By torchrun, or by a scheduler that sets the variables: with a token, as a scheduler would hand it out."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = []
    for number in (0, 1):
        environ = {**os.environ, "SHERD_TOKEN": "t" * 32}
        if torchrun:
            options = ["--nnodes=2", f"--node-rank={number}", "--master-addr=host-a", "--nproc-per-node=1"]
            command = [sys.executable, "-m", "torch.distributed.run", *options, "script.py"]
        else:
            environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "host-a", "MASTER_PORT": "29500"}
            environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(number)}
            command = [sys.executable, "script.py"]
        started.append(two.command(number, *command, env=environ, **pipes))
    for number, (stdout, stderr, status) in enumerate(finished(started)):
        assert (status, stdout.split()) == (0, f"{number} 0 2 1 {number} eth0 1 True".split()), (stdout, stderr)


def test_without_a_token_the_interface_is_named_in_a_warning(two):
    for number, (stdout, stderr, status) in enumerate(finished(both(two, "script.py", ranks=1))):
        assert status == 0, stderr
        assert stdout.endswith("eth0 1 False\n")
        warning = next(line for line in stderr.splitlines() if "warning" in line)
        assert "--token-file FILE" in warning
        assert ("port 29500 of all its interfaces" if number == 0 else "eth0 (10.0.0.3)") in warning


def test_ipv6(two):
    for number in (0, 1):
        address = ["ip", "address", "add", f"fd00::{number + 2}/64", "dev", "eth0", "nodad"]
        assert two.command(number, *address).wait() == 0
    results = finished(both(two, "script.py", address="fd00::2", ranks=1, SHERD_TOKEN="x" * 20))
    assert [(stdout.count("eth0 1"), status) for stdout, _, status in results] == [(1, 0), (1, 0)], results


def test_different_numbers_of_ranks_at_an_address_and_gloo_socket_ifname_wins(two):
    meeting = ["--nnodes", "2", "--master-addr", "10.0.0.2"]
    variables = {"GLOO_SOCKET_IFNAME": "eth0", "SHERD_TOKEN": "x" * 20}
    processes = [
        two.run(n, *meeting, "--node-rank", str(n), "-n", str(n + 1), "script.py", **variables) for n in (0, 1)
    ]
    results = finished(processes)
    assert [status for *_, status in results] == [0, 0], results
    ranks = [[line.split()[0] for line in by_rank(stdout)] for stdout, *_ in results]
    assert ranks == [["0"], ["1", "2"]]
    assert all("over eth0 (GLOO_SOCKET_IFNAME)" in stderr for _, stderr, _ in results)


WAIT = "import time; time.sleep(600)"
CRASH = """
import os, signal, time
if os.environ["RANK"] == "{victim}":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_dies_before_it_imports_anything_is_named_on_every_machine(two, tmp_path, victim):
    (tmp_path / "crash.py").write_text(CRASH.format(victim=victim))
    results = finished(both(two, "crash.py", SHERD_TOKEN="x" * 20))
    where = victim // 2
    (_, here, status), (_, there, other) = results[where], results[1 - where]
    assert (status, other) == (128 + signal.SIGKILL, 1)
    assert re.search(rf"sherd run: rank {victim} failed first \(pid \d+\): killed by SIGKILL", here)
    machine = NAMES[where]
    told = rf"sherd run: rank {victim} on machine {machine} failed first \(pid \d+\): it was killed by SIGKILL\n"
    assert re.search(told, there), there


def test_a_launcher_that_is_stopped_stops_the_other_machines(two, tmp_path):
    (tmp_path / "wait.py").write_text(WAIT)
    first, second = both(two, "wait.py", SHERD_TOKEN="x" * 20)
    lines_until(second.stderr, "machine 1: ranks 2-3 of 4")
    second.send_signal(signal.SIGTERM)
    (_, stderr, status), (_, _, other) = finished([first, second])
    assert (status, other) == (1, 128 + signal.SIGTERM)
    started = r"rank \d on machine host-b failed first \(pid \d+\): it was stopped .* got SIGTERM"
    assert re.search(rf"{started}|the launcher of machine 1 was stopped", stderr)


def test_machine_0_is_killed(two, tmp_path):
    (tmp_path / "wait.py").write_text(WAIT)
    first, second = both(two, "wait.py", SHERD_TOKEN="x" * 20)
    lines_until(second.stderr, "machine 1: ranks 2-3 of 4")
    first.kill()
    (_, stderr, status) = finished([second])[0]
    assert status == 1
    assert "the launcher of machine 0 is gone" in stderr


LEAVE = "import os, time; os.environ['RANK'] == '1' or time.sleep(600)"


@pytest.mark.parametrize(
    ("moment", "number"), [("meeting", signal.SIGTERM), ("running", signal.SIGINT), ("ending", signal.SIGTERM)]
)
def test_a_launcher_whose_cable_is_gone_ends_when_it_is_told_to(two, tmp_path, moment, number):
    """Machine 0 too, which has lost its own address: what it asks its store is not answered either."""
    (tmp_path / "leave.py").write_text(LEAVE if moment == "ending" else WAIT)
    machines = "3" if moment == "meeting" else "2"
    meeting = ["--nnodes", machines, "--master-addr", "10.0.0.2"]
    launchers = [two.run(n, *meeting, "--node-rank", str(n), "leave.py", SHERD_TOKEN="x" * 20) for n in (0, 1)]
    if moment == "meeting":
        # Two connections to port 29500: machine 1 speaks over one and listens at the other.
        tables = [Path(f"/proc/{launchers[1].pid}/net/{name}") for name in ("tcp", "tcp6")]
        _until(lambda: sum(table.read_text().count(":733C 01 ") for table in tables) == 2)
    else:
        for launcher in launchers:
            lines_until(launcher.stderr, "of 2, over eth0")
        ranks = psutil.Process(launchers[1].pid)
        _until(lambda: bool(ranks.children()) == (moment == "running"))
    for host in (two.hosts[0], two.hosts[1]):
        _namespaces.run_inside(host.bridge, "ip", "link", "delete", host.name)
    time.sleep(1)  # for them to ask something
    for launcher in launchers:
        launcher.send_signal(number)
    for _, stderr, status in finished(launchers):
        assert status == 128 + number
        assert f"stopped by {number.name}; all ranks have ended" in stderr


def _until(is_so):
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_stranger_can_end_nothing_with_a_planted_fault(two, tmp_path):
    """With a token, what does not carry its seal is not believed."""
    (tmp_path / "gate.py").write_text("import pathlib, time\nwhile not pathlib.Path('open').exists(): time.sleep(0.05)")
    (tmp_path / "plant.py").write_text(PLANT)
    processes = both(two, "gate.py", SHERD_TOKEN="x" * 20)
    for process in processes:
        lines_until(process.stderr, "of 4, over eth0")
    assert two.command(1, sys.executable, "plant.py").wait(timeout=60) == 0
    time.sleep(1)
    (tmp_path / "open").touch()
    assert [status for *_, status in finished(processes)] == [0, 0]


PLANT = """
import json
from torch.distributed import TCPStore
store = TCPStore("10.0.0.2", 29500, is_master=False, wait_for_workers=False)
store.set("sherd/launch/fault", json.dumps({"rank": 0, "pid": 1, "machine": "m", "how": "was killed"}))
store.set("sherd/launch/off", json.dumps({"why": "because"}))
store.set("sherd/launch/end/1", json.dumps({"well": True}))
store.set("sherd/launch/plan", b"\\x80\\x04K\\x01.")
"""
