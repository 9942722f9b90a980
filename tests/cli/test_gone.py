"""A launcher that is told to end does so, and takes its ranks with it, whatever has become of the other machine."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from sherd.testing import _namespaces
from tests.cli.machines import finished
from tests.helpers.processes import alive, wait_for

pytestmark = pytest.mark.hosts

TRAIN = """
import os, pathlib, sys, time, torch, sherd
moment, rank = sys.argv[1], os.environ["RANK"]
if moment == "handshake":
    pathlib.Path(f"begun-{rank}").touch()
    time.sleep(600 * int(rank))  # rank 0 waits for the other
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
sherd.distribute(model, optimizer, comm=sherd.CommOptions(transport="c10d", timeout=90))
while True:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    pathlib.Path(f"begun-{rank}").touch()
"""


def family(process):
    """A launcher and its ranks."""
    found = psutil.Process(process.pid)
    return [found, *found.children(recursive=True)]


def unplug(machines, other):
    """Nothing says that a cable is gone. Both machines lose their addresses."""
    for number in (0, 1):
        host = machines.hosts[number]
        _namespaces.run_inside(host.bridge, "ip", "link", "delete", host.name)


def kill(machines, other):
    for process in other:
        process.kill()


def unplug_and_kill(machines, other):
    unplug(machines, other)
    kill(machines, other)


def pause(machines, other):
    """It keeps its connections, and answers nothing."""
    for process in other:
        process.suspend()


@pytest.mark.fuzz
@pytest.mark.parametrize("seconds", [0, 2])
@pytest.mark.parametrize("here", [0, 1])
@pytest.mark.parametrize("lose", [unplug, kill, unplug_and_kill, pause])
@pytest.mark.parametrize("moment", ["handshake", "training"])
def test_it_ends_when_the_other_machine_is_gone(machines, tmp_path, moment, lose, here, seconds):
    (tmp_path / "train.py").write_text(TRAIN)
    two = machines(2)
    meeting = ["--nnodes", "2", "--master-addr", "10.0.0.2"]
    launchers = [two.run(n, *meeting, "--node-rank", str(n), "train.py", moment, SHERD_TOKEN="x" * 20) for n in (0, 1)]
    wait_for(lambda: all(Path(tmp_path, f"begun-{rank}").exists() for rank in (0, 1)))
    ours, other = family(launchers[here]), family(launchers[1 - here])
    assert len(ours) == len(other) == 2
    try:
        lose(two, other)
        time.sleep(seconds)  # some find out by themselves
        launchers[here].send_signal(signal.SIGTERM)
        ((_, stderr, status),) = finished([launchers[here]])
        assert status == 128 + signal.SIGTERM or "failed first" in stderr or "is gone" in stderr, (status, stderr)
        assert not any(alive(process.pid) for process in ours)
    finally:
        kill(two, [process for process in other if process.is_running()])
