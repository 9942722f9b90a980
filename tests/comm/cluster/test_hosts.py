"""The cluster transport between hosts with real cables: bits, bytes, and what happens when a cable or a host fails."""

from __future__ import annotations

import itertools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sherd import CommOptions, comm
from sherd.errors import SherdError
from sherd.testing import Died
from tests.comm import test_operations, test_under_way
from tests.helpers.comm_reference import reduced, tensor_of
from tests.helpers.hosts import hosts_or_skip
from tests.helpers.log_lines import log_lines

pytestmark = pytest.mark.hosts

TIMEOUT = 3.0
WARN_AFTER = 1.0

# What a cable carries beside the payload: 66 bytes of headers on each segment of 1448 at most, as many for each
# acknowledgement of what came in the other direction, and the fingerprints, beats and looks into the store.
HEADERS = 0.1
CHATTER = 300_000


@pytest.mark.parametrize(("count", "local"), [(2, 2), (4, 1)])
def test_every_operation(hosts, count, local):
    hosts(count, local).run(test_operations.every_operation, {"transport": "cluster"}, local)


def test_a_mixture(hosts):
    assert min(hosts(2, 2).run(test_under_way.mixture, {"transport": "cluster"}, 11, test_under_way.MIXED)) > 15


def chosen():
    with comm.connect() as c:
        return c.transport, c.names[-1]


def test_hosts_are_found_out(hosts):
    for transport, name in hosts(2, 2).run(chosen):
        assert transport == "cluster"
        assert name.startswith("rank 3 on host1 (pid ")
    assert {transport for transport, _ in hosts(4, 1).run(chosen)} == {"c10d"}


def reduce_and_gather(host, transport, numel, rounds):
    """The bytes that this rank's host sends for a reduce-scatter and an all-gather, by its cable's own count."""
    with comm.connect(CommOptions(transport=transport)) as c:
        inputs = [tensor_of(r, (numel * c.world,), torch.float32) for r in range(c.world)]
        expected = reduced(inputs, c.tree.group)
        c.barrier().wait()
        before = host[c.rank * len(host) // c.world].sent()
        c.barrier().wait()
        for _ in range(rounds):
            mine = c.reduce_scatter(inputs[c.rank]).wait()
            whole = c.all_gather(mine).wait()
        c.barrier().wait()
        sent = host[c.rank * len(host) // c.world].sent() - before
        c.barrier().wait()
        assert torch.equal(whole, expected)
        return sent, c.counters.total().payload


@pytest.mark.parametrize(("count", "local"), [(2, 2), (4, 1)])
def test_the_cable_carries_each_slice_once(hosts, count, local):
    pool, numel, rounds = hosts(count, local), 500_000, 2
    results = pool.run(reduce_and_gather, list(pool), "cluster", numel, rounds)
    per_rank = rounds * 2 * (count - 1) * numel * 4
    per_host = local * per_rank
    for sent, payload in results:
        assert payload == per_rank
        assert per_host < sent < per_host * (1 + HEADERS) + CHATTER


def test_the_flat_transport_sends_more_and_gets_the_same_bits(hosts):
    """That the count can be other than the formula."""
    pool, numel = hosts(2, 2), 500_000
    for sent, _ in pool.run(reduce_and_gather, list(pool), "c10d", numel, 1):
        assert sent > 1.5 * 2 * 2 * numel * 4


# ---------------------------------------------------------------- faults


PLACES = {"cluster": (2, 2), "c10d": (4, 1)}  # hosts, and ranks on each
FAULTY = pytest.mark.parametrize("transport", PLACES)
VICTIM = 1


def attempt(hosts, transport, what, victim):
    """Operations in which `victim`, a host, has `what` done to it; what each rank is told, and after how long."""
    with log_lines() as lines:
        c = comm.connect(CommOptions(transport=transport, timeout=TIMEOUT, warn_after=WARN_AFTER))
        numel = 1_000_000 * c.world
        c.all_reduce(torch.ones(100)).wait()
        if what == "kill":
            time.sleep(0.3)  # all have found whom they watch
        handle = c.all_reduce(torch.ones(numel))  # under way
        if what == "pause":
            time.sleep(0.8)  # all have said that they are in this call: nobody is behind
        local = len(hosts) * c.rank // c.world
        if (what == "pause" and c.rank == 0) or (what != "pause" and local == victim and c.host.rank == 0):
            {"cut": hosts[victim].link_down, "pause": hosts[victim].pause, "kill": kill_myself}[what]()
        begin = time.monotonic()
        error = None
        try:
            handle.wait()
            for _ in range(5):
                c.all_reduce(torch.ones(numel)).wait()
        except SherdError as caught:
            error = caught
        seconds = time.monotonic() - begin
        if what == "pause" and c.rank == 0:
            time.sleep(1.0)  # the others give up at the same time, more or less
            hosts[victim].resume()
        return type(error).__name__, str(error), seconds, [line for line in lines if "waited" in line]


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def aftermath():
    """What the ranks of a case were told. Cases in which all they do is wait, so that several run at once."""
    with ThreadPoolExecutor() as threads:
        cases = itertools.product(("cut", "pause"), PLACES)
        yield {case: threads.submit(after, *case) for case in cases}


def after(what, transport):
    with cluster_or_skip(*PLACES[transport]) as hosts:
        results = hosts.run(attempt, list(hosts), transport, what, VICTIM)
        hosts[VICTIM].link_up()
    return results


@pytest.mark.alone
@FAULTY
def test_a_cut_cable_is_an_error_that_names_host_and_rank_in_time(aftermath, transport):
    results, local = aftermath["cut", transport].result(), PLACES[transport][1]
    for rank, (kind, text, seconds, lines) in enumerate(results):
        assert kind in ("TimedOut", "PeerLost"), (rank, kind, text)
        assert seconds < 2 * TIMEOUT + 1
        named = text + "".join(lines)
        if rank // local == 1:
            assert "on host0 (pid" in named.partition("did not reach this call")[0], (rank, named)
        else:
            assert "on host1 (pid" in named.partition("did not reach this call")[0], (rank, named)


@pytest.mark.alone
@FAULTY
def test_a_paused_host_is_a_warning_and_then_an_error_that_name_it(aftermath, transport):
    results, local = aftermath["pause", transport].result(), PLACES[transport][1]
    for rank, (kind, text, seconds, lines) in enumerate(results):
        if rank // local == 1:
            assert kind in ("TimedOut", "PeerLost"), (rank, kind, text)  # it hears of it when it goes on
            continue
        assert kind == "TimedOut", (rank, kind, text)
        assert "on host1 (pid" in text.partition("did not reach this call")[0], text
        assert seconds < 2 * TIMEOUT + 1
        assert any("on host1 (pid" in line.partition("for ")[2] for line in lines), (rank, lines)


@pytest.mark.alone
@FAULTY
def test_a_rank_killed_on_another_host_is_named_before_any_timeout(transport):
    count, victim = PLACES[transport]  # the first rank of host 1
    with cluster_or_skip(count, victim) as hosts:
        results = hosts.run(attempt, list(hosts), transport, "kill", VICTIM, expected_exits={victim: -signal.SIGKILL})
    for rank, result in enumerate(results):
        if rank == victim:
            assert result == Died(-signal.SIGKILL)
            continue
        kind, text, seconds, _ = result
        assert kind == "PeerLost", (rank, kind, text)
        assert f"rank {victim} on host1 (pid" in text
        assert seconds < TIMEOUT


def over_a_slow_cable(hosts):
    with log_lines() as lines:
        c = comm.connect(CommOptions(transport="cluster", timeout=30, warn_after=0.5))
        c.barrier().wait()
        if c.rank == 2:
            hosts[1].slow_down("10mbit")
        c.barrier().wait()
        total = c.all_reduce(torch.ones(4 * 125_000)).wait()  # 2 x 1 MB: some two seconds
        c.barrier().wait()
        return total[0].item(), [line for line in lines if "waited" in line]


def test_a_slow_cable_is_a_warning_that_names_its_host():
    with cluster_or_skip(2, 2) as hosts:
        results = hosts.run(over_a_slow_cable, list(hosts))
    assert [total for total, _ in results] == [4.0] * 4
    warned = [line for _, lines in results[:2] for line in lines]
    assert any("on host1 (pid" in line.partition("for ")[2] for line in warned), results


def cluster_or_skip(count, local):
    return hosts_or_skip(count, ranks_per_host=local, timeout=40)
