"""Ranks that end, leave or lie before they are connected, or return before the others."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

import sherd
from sherd import CommOptions, comm
from sherd.comm.c10d import wire as wires
from sherd.comm.host.joining.link import Link
from sherd.comm.meeting import handshake as handshakes
from sherd.comm.meeting import meeting_place
from sherd.comm.meeting.handshake import Handshake
from sherd.comm.meeting.notes import Notes
from sherd.comm.trust.seal import Seal
from sherd.comm.waiting import faults
from sherd.errors import ConfigError, SherdError
from sherd.testing import Hosts, run_ranks

pytestmark = pytest.mark.ranks

connecting = importlib.import_module("sherd.comm.connect")  # a function has that name too
TIMEOUT = 60.0
STAGES = ("hello", "torch.distributed", "card", "group", "leader", "reads", "gloo", "columns")


def dies_at(stage, transport, label=None):
    """Rank 1 ends when it is about to say where it has come; the others say what they hear, and when."""
    rank = int(os.environ["RANK"])
    if rank == 1:
        leave = Notes.leave

        def leave_or_die(notes, key, value):
            leave(notes, key, value)
            if key == f"{stage}/1":
                os.kill(os.getpid(), signal.SIGKILL)

        Notes.leave = leave_or_die
        if stage.startswith("link:"):
            setattr(Link, stage[5:], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    host = label and label[rank]

    def connect_and_meet():
        ranks = comm.connect(CommOptions(timeout=TIMEOUT, transport=transport, host=host))
        ranks.barrier().wait()

    return _heard(connect_and_meet)


def _heard(call):
    start = time.monotonic()
    try:
        call()
    except SherdError as error:
        return type(error).__name__, str(error), getattr(error, "ranks", ()), time.monotonic() - start
    return "nothing", "", (), 0.0


def check_named(results, survivors, seconds=TIMEOUT / 2):
    for rank in survivors:
        kind, text, ranks, waited = results[rank]
        assert kind == "PeerLost" and ranks == (1,), results[rank]
        assert re.search(r"rank 1 on [\w ]+ \(pid \d+\) (was killed by SIGKILL|ended|was gone)", text), text
        assert waited < seconds, results[rank]


@pytest.mark.parametrize("stage", [*STAGES[:6], "link:watch", "link:share"])
def test_a_rank_killed_on_the_way_to_the_host_transport_is_named(stage):
    check_named(run_ranks(dies_at, 3, stage, "host", timeout=90, expected_exits={1: -9}), (0, 2))


@pytest.mark.parametrize(("stage", "transport"), [("reads", "c10d"), ("gloo", "c10d"), ("columns", "cluster")])
def test_a_rank_killed_while_gloo_connects_is_named(stage, transport):
    results = run_ranks(dies_at, 4, stage, transport, "aabb", timeout=90, expected_exits={1: -9})
    check_named(results, (0, 2, 3))


@pytest.mark.parametrize("stage", ["hello", "gloo"])
@pytest.mark.hosts
def test_a_rank_killed_on_another_host_is_named(stage, hosts_of_one):
    check_named(hosts_of_one.run(dies_at, stage, "c10d", timeout=90, expected_exits={1: -9}), (0, 2))


@pytest.mark.fake
def test_what_a_rank_finds_in_its_hello_reaches_those_that_are_past_theirs():
    store, past = torch.distributed.HashStore(), threading.Event()

    class SeesTheOtherGone(Handshake):
        def _lost(self):
            assert past.wait(TIMEOUT)
            return faults.lost_early({1: "rank 1 on b (pid 7) ended"})

    def one_that_sees():
        return _heard(lambda: SeesTheOtherGone(store, 1, range(2), CommOptions(timeout=TIMEOUT)))

    def one_that_is_past():
        with Handshake(store, 0, range(2), CommOptions(timeout=TIMEOUT)) as handshake:
            past.set()
            handshake.exchange("card", 0)

    with ThreadPoolExecutor() as threads:
        seen = threads.submit(one_that_sees)
        check_named([_heard(one_that_is_past), None, seen.result()], (0, 2))


@pytest.fixture(scope="module")
def hosts_of_one():
    with Hosts(3, ranks_per_host=1) as hosts:
        yield hosts


def sends_and_leaves():
    """Rank 0's last words are on their way when it leaves."""
    with comm.connect(CommOptions(timeout=TIMEOUT, transport="c10d")) as ranks:
        values = torch.arange(300_000.0) if ranks.rank == 0 else torch.zeros(300_000)
        return _heard(lambda: ranks.broadcast(values).wait())[0], values.sum().item()


@pytest.mark.hosts
def test_what_a_rank_has_sent_arrives_after_it_has_left(hosts_of_one):
    hosts_of_one[0].slow_down("8mbit")
    try:
        found = hosts_of_one.run(sends_and_leaves, timeout=90)
    finally:
        hosts_of_one[0].slow_down("10gbit")
    assert found == [("nothing", torch.arange(300_000.0).sum().item())] * 3


def dies_in_a_subgroup(transport):
    rank = int(os.environ["RANK"])
    ranks = comm.connect(CommOptions(timeout=TIMEOUT, transport=transport, host="aabb"[rank]))
    if rank == 1:
        wires.over_gloo = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return _heard(lambda: ranks.subgroup([0, 1, 2, 3]))


@pytest.mark.parametrize("transport", ["c10d", "cluster"])
def test_a_rank_killed_while_a_subgroup_connects_is_named(transport):
    check_named(run_ranks(dies_in_a_subgroup, 4, transport, timeout=90, expected_exits={1: -9}), (0, 2, 3))


def starts_again():
    """As in a process that a launcher starts again, in the store that it had before."""
    results = []
    for attempt in range(2):
        meeting_place._times, connecting._connections = itertools.count(), itertools.count()
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        with comm.connect(CommOptions(timeout=TIMEOUT)) as ranks:
            results.append(ranks.all_reduce(torch.ones(1)).wait().item())
        torch.distributed.destroy_process_group()
    return results


def test_ranks_that_a_launcher_starts_again_find_nothing_of_the_last_time():
    assert run_ranks(starts_again, 2, timeout=90) == [[2.0, 2.0]] * 2


def one_host_without_a_launchers_word():
    handshakes.several_hosts = lambda: True  # so that a door is opened for ranks of other hosts
    with comm.connect(CommOptions(timeout=TIMEOUT)) as ranks:
        return ranks.transport, ranks.all_reduce(torch.ones(1)).wait().item()


def test_ranks_of_one_host_that_might_have_been_on_several():
    assert run_ranks(one_host_without_a_launchers_word, 2, timeout=90) == [("host", 2.0)] * 2


def a_group_first(store):
    """A group of one host's ranks must not tell gloo for all others where to listen."""
    del os.environ["GLOO_SOCKET_IFNAME"]
    rank = int(os.environ["RANK"])
    place = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    options = CommOptions(timeout=TIMEOUT, transport="c10d")
    with connecting.join(torch.distributed.PrefixStore(store, place), rank, range(2), options) as ranks:
        assert ranks.all_reduce(torch.ones(1)).wait().item() == 2
    return os.environ.get("GLOO_SOCKET_IFNAME")


def test_what_a_group_tells_gloo_is_for_that_group():
    assert run_ranks(a_group_first, 2, "group", timeout=90) == [None, None]


def fails_at(stage):
    rank = int(os.environ["RANK"])
    if rank == 1:
        exchange = Handshake.exchange

        def exchange_or_fail(self, key, value):
            if key == stage:
                raise ConfigError("rank 1 does not like it")
            return exchange(self, key, value)

        Handshake.exchange = exchange_or_fail
    return _heard(lambda: comm.connect(CommOptions(timeout=TIMEOUT)))


def test_a_rank_that_fails_in_the_handshake_tells_the_others():
    first, second, third = run_ranks(fails_at, 3, "leader", timeout=90)
    assert second[:2] == ("ConfigError", "rank 1 does not like it")
    for kind, text, ranks, _ in (first, third):
        assert kind == "PeerLost" and ranks == (1,)
        assert "failed with ConfigError: rank 1 does not like it" in text


def returns_early(strategy, transport):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = CommOptions(timeout=TIMEOUT, transport=transport)
    model, optimizer = sherd.distribute(model, optimizer, strategy=strategy, comm=options)

    def train():
        for step in range(3):
            if step == 1 and int(os.environ["RANK"]) == 1:
                return
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return _heard(train)


@pytest.mark.parametrize(("strategy", "transport"), [("ddp", "host"), ("zero2", "host"), ("zero3", "c10d")])
def test_a_rank_whose_function_returns_early_has_left(strategy, transport, ranks):
    first, second = ranks(2).run(returns_early, strategy, transport, timeout=90)
    kind, text, lost, waited = first
    assert (kind, lost, second[0]) == ("PeerLost", (1,), "nothing")
    assert re.search(r"rank 1 on \S+ \(pid \d+\) left", text), text
    assert waited < TIMEOUT / 2


def waits_without_holding(transport):
    """A call of a communicator that nobody holds any more, while a rank ends."""
    held = [comm.connect(CommOptions(timeout=TIMEOUT, transport=transport))]
    held[0].barrier().wait()
    if int(os.environ["RANK"]) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return _heard(lambda: held.pop().barrier().wait())


@pytest.mark.parametrize(("transport", "error"), [("host", "CommClosed"), ("c10d", "PeerLost")])
def test_a_call_of_a_dropped_communicator_does_not_wait_for_the_dead(transport, error):
    first, _ = run_ranks(waits_without_holding, 2, transport, timeout=90, expected_exits={1: -9})
    assert first[0] in (error, "PeerLost") and first[3] < TIMEOUT / 2, first
    assert "keep it in a variable" in first[1] or "rank 1 on" in first[1]


# ---------------------------------------------------------------- lies


def with_tokens(tokens):
    os.environ["SHERD_TOKEN"] = tokens[int(os.environ["RANK"])]
    handshakes.FORGED_FOR = 0.2
    return _heard(lambda: comm.connect(CommOptions(timeout=TIMEOUT)).close())


def test_ranks_with_other_tokens_are_told_so():
    results = run_ranks(with_tokens, 2, ["a" * 32, "b" * 32], timeout=90)
    for rank, (kind, text, ranks, _) in enumerate(results):
        assert (kind, ranks) == ("CommError", (1 - rank,)), results
        assert "give all machines the same SHERD_TOKEN" in text
    assert [result[0] for result in run_ranks(with_tokens, 2, ["a" * 32] * 2, timeout=90)] == ["nothing"] * 2


def lied_to(transport):
    """A stranger writes what ranks write, under their names, at every turn."""
    os.environ["SHERD_TOKEN"] = "t" * 32
    rank = int(os.environ["RANK"])
    stranger = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    word = b'{"kind": "failed", "rank": 1, "ranks": [1], "text": "a lie"}'
    place = "sherd/meeting/0/0/sherd/0/"
    if rank == 0:
        for key in (*(place + key for key in ("fault", "sherd/fault", "hello/7", "come")), handshakes.LAUNCHERS):
            stranger.set(key, word)
        earlier = Seal(b"t" * 32).derived("sherd").derived("handshake of [0, 1] in ('an earlier run', '0')")
        stranger.set(f"{place}fault", earlier.sealed("fault", word))
    with comm.connect(CommOptions(timeout=TIMEOUT, transport=transport)) as ranks:
        assert stranger.check([f"{place}hello/{rank}"]), "that is where ranks meet"
        return ranks.all_reduce(torch.ones(2)).wait().tolist()


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_what_a_stranger_writes_into_the_store_is_not_believed(transport):
    assert run_ranks(lied_to, 2, transport, timeout=90) == [[2.0, 2.0]] * 2


@pytest.mark.fake
def test_notes_of_others_are_not_there(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"))
    mine, theirs = Notes(store, Seal(b"mine")), Notes(store, Seal(b"theirs"))
    theirs.leave("a", 1)
    assert mine.find("a") is None and theirs.find("a") == 1
    mine.leave_first("a", 2)
    assert mine.find("a") == 2 and theirs.find("a") is None
    mine.leave_first("a", 3)
    assert mine.find("a") == 2
    assert mine.missing(["a", "b"]) == ["b"]
    for notes in (mine, theirs):
        notes.close()
