"""A job that is paused as a whole goes on when it is woken; a rank that is paused alone is late, and named."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from sherd import CommOptions, comm
from sherd.comm.waiting.patience import Stopwatch
from sherd.errors import SherdError
from sherd.testing import run_ranks
from tests.helpers.hosts import on_hosts

pytestmark = pytest.mark.ranks

TIMEOUT = 2.5
PAUSE = 5.5  # gloo's own timer was twice ours


def doze():
    """Be late by looks, not by the clock: what is left of it is left after a pause."""
    for _ in range(50):
        time.sleep(0.01)


def steps(folder, transport):
    c = comm.connect(CommOptions(transport=transport, timeout=TIMEOUT))
    (folder / f"pid {c.rank}").write_text(str(os.getpid()))
    c.barrier().wait()
    x, after, before = torch.ones(300 * c.world), (c.rank + 1) % c.world, (c.rank - 1) % c.world
    for number in range(3):
        if c.rank == 1 and number == 1:
            (folder / "late").touch()
            doze()
        received = torch.empty(200_000)
        handles = [c.recv(received, before), c.send(torch.full((200_000,), float(c.rank)), after)]
        handles += [c.all_reduce(x), c.reduce_scatter(x), c.all_gather(x), c.broadcast(x, 0), c.all_to_all(x)]
        for handle in handles:
            handle.wait()
        assert received[-1] == before
    c.close()
    return "through"


def pause(folder, victims):
    """Stop the victims while the others wait for rank 1, and wake them after some seconds."""
    while not (folder / "late").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    pids = [int((folder / f"pid {rank}").read_text()) for rank in victims]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(PAUSE)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def paused(folder, victims, world, fn, *args):
    threading.Thread(target=pause, args=(folder, victims), daemon=True).start()
    return run_ranks(fn, world, *args, timeout=100)


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_a_job_that_was_paused_goes_on(tmp_path, transport):
    assert paused(tmp_path, (0, 1), 2, steps, tmp_path, transport) == ["through"] * 2


def test_a_job_on_two_hosts_that_was_paused_goes_on(tmp_path):
    assert paused(tmp_path, range(4), 4, on_hosts, 2, steps, tmp_path, "cluster") == ["through"] * 4


def told(folder, transport):
    try:
        return steps(folder, transport)
    except SherdError as error:
        return str(error)


@pytest.mark.parametrize("transport", ["host", "c10d", "cluster"])
def test_a_rank_that_is_paused_alone_is_named(tmp_path, transport):
    if transport == "cluster":
        results = paused(tmp_path, (1,), 4, on_hosts, 2, told, tmp_path, transport)
    else:
        results = paused(tmp_path, (1,), 2, told, tmp_path, transport)
    for rank, text in enumerate(results):
        if rank != 1:
            assert "rank 1 on" in text.partition("did not reach this call within")[0], text


@pytest.mark.pure
def test_a_jump_of_the_clock_counts_for_no_more_than_a_look(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("sherd.comm.waiting.patience.time.monotonic", lambda: now[0])
    watch = Stopwatch()
    for seconds, counted in ((0.25, 0.25), (3600.0, 1.25), (0.5, 1.75)):
        now[0] += seconds
        assert watch.seconds() == counted
