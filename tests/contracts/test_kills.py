"""Ranks that are killed at random moments, from their hello on: every survivor names the one that died, at once.

Without a launcher a rank is unknown before its hello; a launcher knows it from its start.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import sherd
from sherd import CommOptions
from sherd.comm.meeting.notes import Notes
from sherd.errors import SherdError
from sherd.testing import Hosts, RankPool

pytestmark = pytest.mark.ranks

WORLD = 3
ENDS = r"\(pid \d+\) (was killed by SIGKILL|ended|was gone|left)"
PATIENT = 20.0  # seconds, where others use the machine too: far below the timeout
TIMEOUT = 120.0
KILLS = 20  # of each kind, for `make fuzz`


def trains_until_killed(victim, delay, transport, died):
    """The victim ends itself `delay` seconds after its hello; the others say what they heard, and how long after."""
    if int(os.environ["RANK"]) == victim:
        _arm(delay, Path(died))
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    options = CommOptions(timeout=TIMEOUT, transport=transport)
    try:
        model, optimizer = sherd.distribute(model, optimizer, comm=options)
        while True:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except SherdError as error:
        heard = time.monotonic()
        return type(error).__name__, str(error), heard - float(Path(died).read_text())


def _arm(delay, died):
    leave, armed = Notes.leave, []

    def die():
        time.sleep(delay)
        died.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def leave_and_arm(notes, key, value):
        leave(notes, key, value)
        if key.startswith("hello") and not armed:
            armed.append(True)
            threading.Thread(target=die, daemon=True).start()

    Notes.leave = leave_and_arm


def delays(count, seed):
    """Half of them in the handshake, which takes a tenth of a second."""
    draw = random.Random(seed)
    return [(draw.randrange(WORLD), draw.uniform(0, 0.15) if i % 2 else draw.uniform(0.15, 1.5)) for i in range(count)]


def check_kills(pool, tmp_path, transport, count, seed, limit):
    for number, (victim, delay) in enumerate(delays(count, seed)):
        died = tmp_path / f"died-{number}"
        arguments = (victim, delay, transport, str(died))
        heard = pool.run(trains_until_killed, *arguments, timeout=60, expected_exits={victim: -signal.SIGKILL})
        for rank in set(range(WORLD)) - {victim}:
            kind, text, seconds = heard[rank]
            case = (number, victim, delay, rank, heard[rank])
            assert kind == "PeerLost", case
            assert re.search(rf"rank {victim} on \S+ \(pid \d+\) (was killed by SIGKILL|ended|was gone|left)", text), (
                case
            )
            assert seconds < limit, case


SCRIPT = """
import torch, sherd
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
model, optimizer = sherd.distribute(model, optimizer)
while True:
    model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""


def killed_by_hand(script, delay, draw):
    """Start ranks, kill one after a while, and see what the launcher says: the rank, its words and the seconds."""
    command = [sys.executable, "-m", "sherd.cli", "run", "-n", str(WORLD), str(script)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as launcher:
        try:
            children = []
            while len(children) < WORLD:
                children = [child for child in psutil.Process(launcher.pid).children() if _rank_of(child) is not None]
                time.sleep(0.01)
            time.sleep(delay)
            victim = draw.choice(children)
            rank, start = _rank_of(victim), time.monotonic()
            victim.send_signal(signal.SIGKILL)
            said = []
            for line in launcher.stderr:
                said.append(line)
                if "failed first" in line:
                    break
            return rank, "".join(said), time.monotonic() - start
        finally:
            launcher.kill()


def _rank_of(process):
    try:
        rank = process.environ().get("RANK")
        return None if rank is None else int(rank)
    except psutil.Error:
        return None


def check_launched(tmp_path, count, seed, limit):
    script, draw = tmp_path / "script.py", random.Random(seed)
    script.write_text(SCRIPT)
    for _ in range(count):
        delay = draw.uniform(0, 6)
        rank, said, seconds = killed_by_hand(script, delay, draw)
        assert re.search(rf"rank {rank} failed first \(pid \d+\): killed by SIGKILL", said), (delay, said)
        assert seconds < limit, (delay, seconds, said)


def test_a_rank_killed_at_a_random_moment_is_named(tmp_path):
    with RankPool(WORLD) as pool:
        check_kills(pool, tmp_path, "host", 2, 0, PATIENT)
        check_kills(pool, tmp_path, "c10d", 2, 1, PATIENT)


def test_a_rank_killed_under_the_launcher_is_named(tmp_path):
    check_launched(tmp_path, 1, 0, PATIENT)


@pytest.mark.fuzz
@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_many_kills_on_one_host(tmp_path, transport):
    with RankPool(WORLD) as pool:
        check_kills(pool, tmp_path, transport, KILLS // 2, 2, 1.0)


@pytest.mark.hosts
@pytest.mark.fuzz
def test_many_kills_across_hosts(tmp_path):
    with Hosts(WORLD, ranks_per_host=1) as hosts:
        check_kills(hosts, tmp_path, "c10d", KILLS, 3, 3.0)


@pytest.mark.fuzz
def test_many_kills_under_the_launcher(tmp_path):
    check_launched(tmp_path, KILLS, 4, 1.0)
