"""Long runs leave nothing behind: steps, connections, programs that go wrong. Short ones here, long in `make fuzz`."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sherd
from sherd import CommOptions, comm
from sherd.errors import CommClosed, CommError, Diverged, PeerLost
from sherd.testing import Died
from tests.contracts.divergent_programs import WORLD, Odd, execute, program
from tests.helpers.processes import descriptors

MEGABYTES = 6.0
"""What a process may grow by: caches are bounded. Torch's flight recorder keeps gloo's last 2,000 collectives, 1.7 MB
of them (with TORCH_FR_BUFFER_SIZE=0, none)."""

OBJECT = 100
"""Bytes of one of Python's small objects, which it keeps in arenas of its own: about, on average."""

_libc = ctypes.CDLL(None)


class _Mallinfo(ctypes.Structure):
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def _by_malloc():
    """Megabytes that glibc has given out: tensors, and Python's larger objects."""
    if not hasattr(_libc, "mallinfo2"):
        return 0.0
    _libc.mallinfo2.restype = _Mallinfo
    info = _libc.mallinfo2()
    return (info.uordblks + info.hblkhd) / 2**20


def _shared():
    """Megabytes of shared memory that this process has touched."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssShmem")) / 1024


class Footprint:
    """What this process has: descriptors, threads of any kind, and memory by who gave it out.

    Not its resident size: that depends on how freed memory is cut up, which moved by 43 MB in a run that kept nothing.
    """

    def __init__(self):
        gc.collect()
        self.descriptors = descriptors()
        self.threads = len(list(Path("/proc/self/task").iterdir()))
        self.malloc = _by_malloc()
        self.shared = _shared()
        self.objects = sys.getallocatedblocks() * OBJECT / 2**20

    def __repr__(self):
        memory = f"{self.malloc:.1f} MB by malloc, {self.shared:.1f} MB shared, {self.objects:.1f} MB of small objects"
        return f"{self.descriptors} descriptors, {self.threads} threads, {memory}"


def settled(before):
    """What there is now, when threads and sockets of what was closed had time to end: nobody waits for them."""
    deadline = time.monotonic() + 15.0
    while True:
        now = Footprint()
        flat = now.descriptors <= before.descriptors and now.threads <= before.threads
        if flat or time.monotonic() > deadline:
            return now
        time.sleep(0.05)


def flat(before, after):
    assert after.descriptors <= before.descriptors, (before, after)
    assert after.threads <= before.threads, (before, after)
    assert after.malloc < before.malloc + MEGABYTES, (before, after)
    assert after.shared < before.shared + MEGABYTES, (before, after)
    assert after.objects < before.objects + MEGABYTES, (before, after)


# ---------------------------------------------------------------- steps


def train(strategy, transport, steps, warm_up):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    loader = DataLoader(TensorDataset(torch.randn(48, 8), torch.randn(48, 4)), batch_size=4, shuffle=True)
    with comm.connect(CommOptions(transport=transport, timeout=100)) as c:
        sherd.distribute(model, optimizer, loader, strategy=strategy, clip_norm=1.0, comm=c)
        taken, before = 0, None
        while taken < warm_up + steps:
            for x, y in loader:
                loss = (model(x) - y).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                taken += 1
            if before is None and taken >= warm_up:
                before = Footprint()
        assert loss.isfinite()
        flat(before, settled(before))


TRAINED = [("zero2", "host"), ("ddp", "c10d")]


@pytest.mark.parametrize(("strategy", "transport"), TRAINED)
def test_steps_leave_nothing_behind(ranks, strategy, transport):
    ranks(2).run(train, strategy, transport, 200, 70)


@pytest.mark.fuzz
@pytest.mark.parametrize(("strategy", "transport"), TRAINED)
def test_ten_thousand_steps_leave_nothing_behind(ranks, strategy, transport):
    ranks(2).run(train, strategy, transport, 10_000, 1_000, timeout=1000)


# ---------------------------------------------------------------- connections


def connect_once(transport):
    host = str(int(os.environ["RANK"]) // 2) if transport == "cluster" else None
    with comm.connect(CommOptions(transport=transport, timeout=100, host=host)) as c:
        assert c.transport == transport
        assert c.all_reduce(torch.ones(3)).wait().tolist() == [c.world] * 3
        c.barrier().wait()


def backend_once(_):
    dist.init_process_group("sherd", pg_options=CommOptions(timeout=100))
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [dist.get_world_size()] * 3
    dist.destroy_process_group()


def again_and_again(once, what, times):
    for _ in range(3):
        once(what)
    before = settled(Footprint())
    for _ in range(times):
        once(what)
    flat(before, settled(before))


CONNECTED = [(connect_once, "host", 2), (connect_once, "c10d", 2), (connect_once, "cluster", 4), (backend_once, "", 2)]


@pytest.mark.parametrize(("once", "what", "world"), CONNECTED)
def test_connections_leave_nothing_behind(ranks, once, what, world):
    ranks(world).run(again_and_again, once, what, 6)


@pytest.mark.fuzz
@pytest.mark.parametrize(("once", "what", "world"), CONNECTED)
def test_125_connections_leave_nothing_behind(ranks, once, what, world):
    ranks(world).run(again_and_again, once, what, 125, timeout=1000)


# ---------------------------------------------------------------- programs that go wrong

TIMEOUT = 10.0  # also of connecting, on a machine that is busy
LATE = 30.0
"""How much later than that an error may come on a machine that is busy."""
GONE = ("leave", "raise", "kill")


def outcome(plan):
    """How a program ends on this rank: in nothing, or in an error that names a rank."""
    began = time.monotonic()
    c = comm.connect(CommOptions(transport=plan.transport, timeout=TIMEOUT))
    try:
        with c:
            execute(c, plan)
    except CommError as error:
        # A call that is made while an earlier one finds out is refused, with the reason in its words.
        if plan.kind in GONE:
            assert isinstance(error, PeerLost | CommClosed), (plan, type(error), error)
            assert f"rank {plan.who}" in str(error), (plan, error)
        else:  # it may be a peer that finds out first and leaves
            assert isinstance(error, Diverged | PeerLost | CommClosed), (plan, type(error), error)
            assert re.search(r"rank \d", str(error)), (plan, error)
        assert time.monotonic() - began < TIMEOUT + LATE, plan
        return type(error).__name__
    except Odd:
        assert plan.kind == "raise"
        return "Odd"
    return None


SURVIVED = ("order", "shape", "dtype", "how", "missing", "leave", "raise")


def many_programs(seeds):
    with comm.connect(CommOptions(transport="host", timeout=200)) as outer:
        before = None
        for number, seed in enumerate(seeds):
            if number == len(seeds) // 3:  # glibc gives threads heaps of their own, one after the other
                before = settled(Footprint())
            plan = program(seed, SURVIVED)
            found = outer.all_gather_object(outcome(plan))
            assert any(found), (seed, plan, found)
        flat(before, settled(before))


def one_program(seed):
    return outcome(program(seed, ("kill",)))


def killed(pool, seed):
    plan = program(seed, ("kill",))
    found = pool.run(one_program, seed, expected_exits={plan.who: -signal.SIGKILL}, timeout=100)
    assert found[plan.who] == Died(-signal.SIGKILL)
    assert any(each for rank, each in enumerate(found) if rank != plan.who), (seed, plan, found)


def test_programs_that_go_wrong_end_everywhere(ranks):
    ranks(WORLD).run(many_programs, range(15))


def test_ranks_that_are_killed_in_a_program_are_named(ranks):
    for seed in range(2):
        killed(ranks(WORLD), seed)


@pytest.mark.fuzz
def test_270_programs_that_go_wrong_end_everywhere(ranks):
    ranks(WORLD).run(many_programs, range(1000, 1270), timeout=1100)


@pytest.mark.fuzz
def test_ranks_that_are_killed_in_30_programs_are_named(ranks):
    for seed in range(1000, 1030):
        killed(ranks(WORLD), seed)
