"""Nothing is left behind: descriptors, memory, threads and processes after many operations and after faults."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, ReduceOp

from sherd import CommOptions, comm
from sherd.comm.c10d import sockets
from sherd.comm.c10d.wire import over_gloo
from sherd.errors import CommClosed, Diverged, PeerLost, SherdError
from sherd.testing import run_ranks
from tests.helpers.processes import descriptors, eventually, python, sherd

pytestmark = pytest.mark.ranks

TRANSPORTS = ("host", "c10d")


def shared_mappings():
    gc.collect()
    return sum("memfd:sherd-" in line for line in Path("/proc/self/maps").read_text().splitlines())


def tasks():
    """Threads of Python and of gloo."""
    return len(list(Path("/proc/self/task").iterdir()))


def threads(at_most, count=tasks):
    """How many there are, once those of closed communicators have ended: nobody waits for them."""
    eventually(lambda: count() <= at_most, 10.0)
    return count()


def settled(before):
    """Descriptors, shared mappings and threads, once they are what they were before, or some seconds later."""
    idle = threads(before[2])
    return descriptors(), shared_mappings(), idle


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


def use(c):
    if c.shares_memory:
        c.shared_tensor(1000)
        c.shared_buffers(1000)
    c.all_reduce(torch.ones(100_000)).wait()
    received = torch.empty(3)
    handles = [c.send(torch.ones(3), (c.rank + 1) % c.world), c.recv(received, (c.rank - 1) % c.world)]
    for handle in handles:
        handle.wait()
    group = c.subgroup(range(c.world))
    group.all_reduce(torch.ones(10)).wait()
    c.barrier().wait()
    return group


def connect_and_close(transport, times):
    def once():
        with comm.connect(CommOptions(transport=transport)) as c:
            use(c).close()
        return c  # it may be kept: what it held is gone

    once()
    idle = threads(at_most=1, count=threading.active_count)
    before = descriptors(), shared_mappings(), tasks() - threading.active_count() + idle
    kept = [once() for _ in range(times)]
    after = settled(before)
    with pytest.raises(CommClosed, match="it was closed"):
        kept[0].all_reduce(torch.ones(3))
    return before, after


def connect_and_drop(transport, times):
    def once():
        use(comm.connect(CommOptions(transport=transport)))

    once()
    idle = threads(at_most=1, count=threading.active_count)
    before = descriptors(), shared_mappings(), tasks() - threading.active_count() + idle
    for _ in range(times):
        once()
        gc.collect()  # before the next one is connected: ranks that leave at other times are errors
    return before, settled(before)


def leave_nothing(results):
    for before, after in results:
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("way", [connect_and_close, connect_and_drop])
def test_communicators_that_are_closed_or_dropped_leave_nothing(ranks, transport, way):
    leave_nothing(ranks(2).run(way, transport, 4))


def closed_at_once(transport):
    for _ in range(5):
        comm.connect(CommOptions(transport=transport)).close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_may_close_what_others_are_still_connecting(ranks, transport):
    ranks(3).run(closed_at_once, transport)


def backend_and_back(times):
    def once():
        dist.init_process_group("sherd")
        dist.all_reduce(torch.ones(3))
        group = dist.new_group()
        dist.barrier(group)
        dist.barrier()
        dist.destroy_process_group()

    once()
    idle = threads(at_most=1, count=threading.active_count)
    before = descriptors(), shared_mappings(), tasks() - threading.active_count() + idle
    for _ in range(times):
        once()
    return before, settled(before)


def test_groups_of_the_backend_that_are_destroyed_leave_nothing():
    leave_nothing(run_ranks(backend_and_back, 2, 4, timeout=100))


def shared_and_dropped(times):
    c = comm.connect(CommOptions(transport="host"))
    counts, kept = [], c.shared_tensor(10)
    for _ in range(times):
        tensor, buffers = c.shared_tensor(1000), c.shared_buffers(1000)
        buffers[c.rank].fill_(c.rank + 1)
        total = c.all_reduce(buffers[c.rank]).wait()
        assert total.tolist() == [3.0] * 1000
        if c.rank == 0:
            later = buffers  # this rank drops its own a round later, and still lends from it
        c.all_reduce(later[0] if c.rank == 0 else torch.ones(1000)).wait()
        del tensor, buffers
        counts.append((descriptors(), shared_mappings()))
    kept.fill_(1.0)
    c.close()
    return counts


def test_shared_memory_that_all_ranks_have_dropped_is_freed(ranks):
    for counts in ranks(2).run(shared_and_dropped, 8):
        assert len(set(counts[3:])) == 1, counts


def closed_by_another_thread(transport):
    c = comm.connect(CommOptions(transport=transport, timeout=100.0))
    c.barrier().wait()
    if c.rank == 1:
        time.sleep(1.5)
        c.close()
        return []
    threading.Timer(0.5, c.close).start()
    with pytest.raises((CommClosed, PeerLost)) as caught:
        c.all_reduce(torch.ones(3)).wait()
    return [type(caught.value).__name__]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_wait_ends_when_another_thread_closes_the_communicator(ranks, transport):
    assert ranks(2).run(closed_by_another_thread, transport) == [["CommClosed"], []]


def stuck_and_closed(transport):
    """Both wait for a message of the other that never comes, and neither end of the connection is closed by itself."""
    comm.connect(CommOptions(transport=transport)).close()
    idle = threads(at_most=1, count=threading.active_count)
    before = descriptors(), shared_mappings(), tasks() - threading.active_count() + idle
    c = comm.connect(CommOptions(transport=transport, timeout=60.0))
    handle = c.recv(torch.empty(3), 1 - c.rank)
    with pytest.raises(SherdError):
        handle.wait()
    c.close()
    if transport == "host":
        del handle  # it holds the memory that it was to read
    return before, settled(before)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_waits_in_the_backend_is_woken_by_close(ranks, transport):
    leave_nothing(ranks(2).run(stuck_and_closed, transport))


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


def idle_after_one(transport):
    """What there is when a communicator was closed: some of it is made once for the process."""
    comm.connect(CommOptions(transport=transport)).close()
    idle = threads(at_most=1, count=threading.active_count)
    return descriptors(), shared_mappings(), tasks() - threading.active_count() + idle


def after_a_fault(transport):
    before = idle_after_one(transport)
    c = comm.connect(CommOptions(transport=transport))
    c.barrier().wait()
    if c.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    handle = None
    with pytest.raises(PeerLost):
        handle = c.all_reduce(torch.ones(1_000_000))
        handle.wait()
    c.close()
    del handle
    return before, settled(before)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_fault_leaves_nothing(transport):
    leave_nothing(run_ranks(after_a_fault, 2, transport, expected_exits={1: -9}, timeout=100)[:1])


def broken_in_the_middle(times):
    """Rank 0 gives up while a large message is on its way in both directions."""
    before = idle_after_one("c10d")
    for _ in range(times):
        expected = contextlib.suppress(PeerLost, ZeroDivisionError)
        with expected, comm.connect(CommOptions(transport="c10d", timeout=60)) as c:
            handle = c.all_to_all(torch.ones(c.world << 23))
            if c.rank == 0:
                with sockets._own_handle(c._wire.connections._known[0]) as connection:
                    while max(sockets._traffic(connection)[0]) < 1 << 20:
                        pass
                raise ZeroDivisionError
            handle.wait()
        handle = None  # which holds the backend's work
    return before, settled(before)


@pytest.mark.alone  # what moves on a connection is seen to rest within tenths of a second
def test_what_breaks_in_the_middle_of_a_message_leaves_nothing():
    leave_nothing(run_ranks(broken_in_the_middle, 2, 4))


def broken_and_dropped(transport, how):
    """Without a collection of cycles: an error's traceback must not hold what raised it."""
    c = comm.connect(CommOptions(transport=transport, timeout=30.0))
    there, x = weakref.ref(c), torch.ones(4)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(Diverged):
            (c.recv(x, 1) if c.rank == 0 and how == "message" else [c.all_gather, c.all_reduce][c.rank](x)).wait()
            return "no error"
        del c
        return eventually(lambda: there() is None, 20.0)  # the other rank wakes the thread of a message when it leaves
    finally:
        gc.enable()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", ["collective", "message"])
def test_a_communicator_that_failed_and_that_nobody_holds_is_gone_at_once(ranks, transport, how):
    assert ranks(2).run(broken_and_dropped, transport, how) == [True, True]


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
from sherd.comm.c10d.operations import Lane, LaneOperation

def late():
    time.sleep({seconds})
    print("came back", flush=True)

lane = Lane("late")
lane.add(LaneOperation(iter([late]), print, print))
time.sleep(0.1)
raise SystemExit(3)
"""


@pytest.mark.parametrize(("seconds", "printed"), [(0.4, "came back\n"), (60, "")])
def test_a_process_waits_a_while_for_threads_in_the_backend_when_it_ends(seconds, printed):
    """They would abort it; and one that does not come back keeps nobody."""
    done = python(COMING_BACK.format(seconds=seconds), seconds=50)
    assert (done.returncode, done.stdout, done.stderr) == (3, printed, "")


FORKS = """
import os, signal, sys
from sherd import CommOptions, comm
ranks = comm.connect(CommOptions(transport=sys.argv[1]))
ranks.barrier().wait()
child = os.fork()
if not child:
    signal.alarm(30)
    sys.exit(3)  # as an interpreter ends, and not as workers do
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
ranks.barrier().wait()
assert status == 3, status
"""


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_a_forked_process_may_end_as_processes_do(tmp_path, transport):
    (tmp_path / "forks.py").write_text(FORKS)
    done = sherd("run", "-n", "2", tmp_path / "forks.py", transport)
    assert done.returncode == 0, done.stderr
