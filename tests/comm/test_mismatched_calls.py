"""A message on one rank against a collective on another, or against no message: named at once, never falsely."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sherd import CommOptions, comm
from sherd.comm.waiting.deadlock import COLLECTIVE, RECV, SEND, Stance, circle
from sherd.errors import CommClosed, Diverged, SherdError
from tests.helpers.hosts import on_hosts

TIMEOUT = 60.0
NOTICE = 15.0  # seconds; far below TIMEOUT, far above what it takes
TRANSPORTS = ("host", "c10d")
BIG = 1_000_000  # no channel holds it


def call(c, which, peer):
    x = torch.ones(BIG if which == "send" else 4)
    calls = {
        "all_reduce": lambda: c.all_reduce(x),
        "barrier": lambda: c.barrier(),
        "recv": lambda: c.recv(x, peer),
        "send": lambda: c.send(x, peer),
    }
    return calls[which]()


def mismatched(transport, first, second, before, pair):
    """The ranks of `pair` make different calls, all others the first one's if that is a collective."""
    c = comm.connect(CommOptions(transport=transport, timeout=TIMEOUT))
    if before:
        c.all_reduce(torch.ones(2)).wait()
        for _ in range(3):  # messages that match
            handles = [c.send(torch.ones(4), (c.rank + 1) % c.world), c.recv(torch.empty(4), (c.rank - 1) % c.world)]
            for handle in handles:
                handle.wait()
    begin = time.monotonic()
    try:
        if c.rank in pair:
            mine, peer = (first, pair[1]) if c.rank == pair[0] else (second, pair[0])
            call(c, mine, peer).wait()
        elif first in ("all_reduce", "barrier"):
            call(c, first, 0).wait()
        c.barrier().wait()
    except SherdError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "no error", "", 0.0


MISMATCHES = [
    ("all_reduce", "recv"),
    ("all_reduce", "send"),
    ("recv", "barrier"),
    ("recv", "recv"),
    ("send", "send"),
]


def named(results, pair, first, second):
    for kind, text, seconds in results:
        assert kind == "Diverged", text
        for rank in pair:
            assert f"rank {rank} on" in text
        for which in (first, second):
            assert f"waits in {which}(" in text
        assert text.count("test_mismatched_calls.py:") == 2
        assert seconds < NOTICE


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("first", "second"), MISMATCHES)
def test_calls_that_wait_for_each_other_are_named_with_both_sites(ranks, transport, first, second):
    named(ranks(2).run(mismatched, transport, first, second, first != "recv", (0, 1)), (0, 1), first, second)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_wait_with_them_hear_of_it(ranks, transport):
    named(ranks(3).run(mismatched, transport, "all_reduce", "recv", True, (2, 1)), (2, 1), "all_reduce", "recv")


@pytest.mark.parametrize("pair", [(0, 1), (0, 3), (2, 0)], ids=["on one host", "on two hosts", "in one column"])
@pytest.mark.parametrize("second", ["recv", "send"])
def test_calls_that_wait_for_each_other_in_a_cluster(ranks, pair, second):
    results = ranks(4).run(on_hosts, 2, mismatched, "cluster", "all_reduce", second, True, pair)
    named(results, pair, "all_reduce", second)


def patient(transport):
    """Ranks that are late and out of step, for longer than it takes to look, in ways that are no mistake."""
    c = comm.connect(CommOptions(transport=transport, timeout=TIMEOUT))
    other, x, y = 1 - c.rank, torch.ones(BIG), torch.empty(BIG)
    wait = 1.2
    # Messages that nobody waits for yet, against a collective.
    handles = [c.send(x, other), c.recv(y, other)] if c.rank == 0 else []
    if c.rank == 1:
        time.sleep(wait)
    c.all_reduce(torch.ones(3)).wait()
    if c.rank == 1:
        time.sleep(wait)
        handles = [c.recv(y, other), c.send(x, other)]
    for handle in handles:
        handle.wait()
    # A receive whose send comes late, between collectives.
    handle = c.all_reduce(torch.ones(BIG))
    if c.rank == 0:
        c.recv(torch.empty(4), 1).wait()
    else:
        time.sleep(wait)
        c.send(torch.ones(4), 0).wait()
    handle.wait()
    # Both wait for sends, with receives issued before.
    handles = [c.recv(y, other), c.send(x, other)]
    if c.rank == 0:
        time.sleep(wait)
    handles[1].wait()
    handles[0].wait()
    c.barrier().wait()
    c.close()
    return "through"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_are_only_late_are_no_mistake(ranks, transport):
    assert ranks(2).run(patient, transport) == ["through"] * 2


def test_ranks_of_two_hosts_that_are_only_late_are_no_mistake(ranks):
    assert ranks(2).run(on_hosts, 1, patient, "cluster") == ["through"] * 2


def last_deeds(transport):
    c = comm.connect(CommOptions(transport=transport, timeout=2.0))
    if c.rank == 0:
        time.sleep(3.0)
        c.close()
        return ""
    with pytest.raises(SherdError) as caught:
        c.recv(torch.empty(4), 0).wait()
    return str(caught.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_in_a_message_is_said_to_be_there(ranks, transport):
    text = ranks(2).run(last_deeds, transport)[1]
    assert "is in recv(float32[4]) at" in text
    assert text.count("has made no call yet") == 1  # rank 0, and not rank 1


def stance(kind, count, peer=-1, collectives=0, sends=None, recvs=None):
    return Stance(kind, peer, count, "", collectives, sends or {}, recvs or {})


@pytest.mark.pure
def test_circles():
    reducing = stance(COLLECTIVE, 1, collectives=1)
    receiving = stance(RECV, 1, 0, recvs={0: 1})
    assert circle(1, {0: reducing, 1: receiving}) == [1, 0]
    assert circle(0, {0: reducing, 1: receiving}) == [0, 1]
    assert circle(2, {0: reducing, 1: receiving, 2: reducing}) == []  # it waits for them, and is in none
    assert circle(1, {0: stance(COLLECTIVE, 1, collectives=1, sends={1: 1}), 1: receiving}) == []
    assert circle(1, {0: reducing, 1: stance(SEND, 2, 0, collectives=1)}) == []
    assert circle(0, {0: stance(RECV, 1, 1), 1: stance(RECV, 1, 2), 2: stance(SEND, 1, 0)}) == [0, 1, 2]
    assert Stance.from_dict(receiving.to_dict()) == receiving


@pytest.mark.pure
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=5))
def test_collectives_alone_are_never_a_circle(numbers):
    """Whatever is under way, a rank waits for no more than it has issued itself."""
    stances = {r: stance(COLLECTIVE, min(count, made), collectives=made) for r, (count, made) in enumerate(numbers)}
    assert all(circle(r, stances) == [] for r in stances)


def another_call_before_the_wait():
    with comm.connect(CommOptions(transport="c10d", timeout=TIMEOUT)) as c:
        if c.rank == 1:
            with pytest.raises(Diverged):
                c.send(torch.ones(3), 0).wait()
                c.barrier().wait()
            return
        message = c.recv(torch.empty(4), 1)
        while not message.done():
            time.sleep(0.01)
        with pytest.raises(Diverged, match=r"message\(|recv\("):
            c.barrier()
        with pytest.raises(CommClosed, match="different calls"):
            c.barrier()


def test_a_call_made_while_a_message_is_found_wrong_raises_the_same_kind_of_error(ranks):
    ranks(2).run(another_call_before_the_wait)
