"""Nothing is left behind: descriptors, memory, threads and processes after many operations and after faults."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore, ReduceOp

from sherd import CommOptions, comm
from sherd.comm.c10d.wire import over_gloo
from sherd.errors import PeerLost
from sherd.testing import run_ranks

TRANSPORTS = ("host", "c10d")


def descriptors():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def shared_mappings():
    gc.collect()
    return sum("memfd:sherd-" in line for line in Path("/proc/self/maps").read_text().splitlines())


def threads(at_most):
    """How many there are, once those of closed communicators have ended: nobody waits for them."""
    deadline = time.monotonic() + 10.0
    while threading.active_count() > at_most and time.monotonic() < deadline:
        time.sleep(0.01)
    return threading.active_count()


def resident_kb():
    return int(next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS")).split()[1])


def a_thousand(transport, count):
    c = comm.connect(CommOptions(transport=transport))
    small, large = torch.ones(100 * c.world), torch.ones(50_000 * c.world)

    def some(times):
        for i in range(times):
            x = large if i % 20 == 0 else small
            c.all_reduce(x).wait()
            c.reduce_scatter(x).wait()
            c.all_gather(x).wait()
            c.broadcast(x, 0).wait()
            c.all_to_all(x).wait()
            received = torch.empty_like(x)
            handles = [c.send(x, (c.rank + 1) % c.world), c.recv(received, (c.rank - 1) % c.world)]
            for handle in handles:
                handle.wait()
            c.all_reduce(torch.ones(i + 1)).wait()  # another shape every time

    some(count // 10)
    before = descriptors(), shared_mappings(), threading.active_count()
    resident = resident_kb()
    some(count)
    after = descriptors(), shared_mappings(), threading.active_count()
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
    grown = resident_kb() - resident
    c.close()
    return grown


@pytest.mark.parametrize(("transport", "count"), [("host", 1000), ("c10d", 150)])
def test_operations_leak_nothing(ranks, transport, count):
    # Seven operations a round. What remains is bounded by the caches of forms and views, not by the count.
    assert max(ranks(2).run(a_thousand, transport, count)) < 30_000


def connect_and_close(transport, times):
    def once():
        with comm.connect(CommOptions(transport=transport)) as c:
            if c.shares_memory:
                c.shared_tensor(1000)
                c.shared_buffers(1000)
            c.all_reduce(torch.ones(100_000)).wait()
            group = c.subgroup(range(c.world))
            group.all_reduce(torch.ones(10)).wait()
            c.barrier().wait()
            group.close()

    idle = threads(at_most=1)
    once()
    idle = threads(idle)
    before = descriptors(), shared_mappings(), idle
    for _ in range(times):
        once()
    idle = threads(idle)
    return before, (descriptors(), shared_mappings(), idle)


def test_closed_host_communicators_leave_nothing(ranks):
    for before, after in ranks(2).run(connect_and_close, "host", 10):
        assert after[:2] == before[:2]
        assert after[2] <= before[2]


def test_closed_c10d_communicators_leave_no_threads(ranks):
    for before, after in ranks(2).run(connect_and_close, "c10d", 3):
        assert after[2] <= before[2]


def dropped(transport):
    before = shared_mappings()  # torch's caches may keep groups of other tests of this process
    c = comm.connect(CommOptions(transport=transport))
    c.barrier().wait()
    if c.rank == 0:
        del c
        return shared_mappings() - before
    with pytest.raises(PeerLost, match=r"rank 0 on .* left"):
        c.barrier().wait()
    return None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_communicator_that_nobody_holds_leaves(ranks, transport):
    assert ranks(2).run(dropped, transport) == [0, None]


def after_a_fault(transport):
    before = descriptors(), shared_mappings()
    c = comm.connect(CommOptions(transport=transport))
    c.barrier().wait()
    if c.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost):
        c.all_reduce(torch.ones(1_000_000)).wait()
    c.close()
    del c
    return before, (descriptors(), shared_mappings())


def test_a_fault_leaves_no_descriptor_and_no_memory():
    before, after = run_ranks(after_a_fault, 2, "host", expected_exits={1: -9})[0]
    assert after[1] == before[1] == 0
    assert after[0] - before[0] <= 12  # torch.distributed's own: its store, its gloo sockets


def leave_from_a_fork():
    c = comm.connect(CommOptions(transport="host"))
    if c.rank == 0:
        child = os.fork()
        if child == 0:
            c.close()
            os._exit(0)
        os.waitpid(child, 0)
        worker = multiprocessing.get_context("fork").Process(target=gc.collect)
        worker.start()
        worker.join()
    result = c.all_reduce(torch.ones(3)).wait().tolist()
    c.close()
    return result


def test_forked_workers_do_no_harm(ranks):
    assert ranks(2).run(leave_from_a_fork) == [[2.0] * 3] * 2


def test_a_forked_process_may_collect_a_group_that_it_inherited():
    """A worker of a loader: it has the group and not its threads."""
    wire = over_gloo(HashStore(), 0, [0], timedelta(seconds=10))
    wire.all_reduce(torch.ones(2), ReduceOp.SUM).wait()
    gc.collect()
    gc.disable()
    try:
        circle = [wire]
        circle.append(circle)
        del wire, circle
        child = os.fork()
        if not child:
            signal.alarm(10)
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        gc.enable()


COMING_BACK = """
import time
from sherd.comm.c10d.lanes import Lane, Message

class Late:
    def wait(self):
        time.sleep({seconds})
        print("came back", flush=True)

lane = Lane("late")
lane.add(Message(iter([Late()]), print, print))
time.sleep(0.1)
raise SystemExit(3)
"""


@pytest.mark.parametrize(("seconds", "printed"), [(0.4, "came back\n"), (60, "")])
def test_a_process_waits_a_while_for_threads_in_the_backend_when_it_ends(seconds, printed):
    """They would abort it; and one that does not come back keeps nobody."""
    command = [sys.executable, "-c", COMING_BACK.format(seconds=seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (3, printed, "")
