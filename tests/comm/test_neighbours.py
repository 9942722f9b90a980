"""What ranks show to a few others: read in place or sent, never overwritten too early, and nobody waits for ever."""

from __future__ import annotations

import random
import time

import pytest
import torch

from sherd.comm import Neighbours
from sherd.errors import CommError
from sherd.layout.topology import TOPOLOGIES
from tests.helpers.training import connected

SIZES = (70_000, 3, 1)  # more and less than a channel's chunk
ROUNDS = 6
CPU = torch.device("cpu")


def shown_by(rank, number, size, dtype):
    return torch.full((size,), 1000.0 * rank + number, dtype=dtype)


def gossip(transport, name, lags=()):
    """Rounds in which every rank shows new values; errors show as wrong values. What this rank counted."""
    random.seed(1)
    with connected(transport) as c:
        graph, neighbours = TOPOLOGIES[name](c.world), Neighbours(c, CPU)
        like = [torch.empty(size, dtype=dtype) for size in SIZES for dtype in (torch.float32, torch.float64)]
        made = neighbours.room(like)
        assert [each.own.dtype for each in made] == [tensor.dtype for tensor in like]
        rooms = {torch.float32: made[::2], torch.float64: made[1::2]}
        start, payloads = c.counters.total().payload, []
        for number in range(ROUNDS):
            mixing = graph.at(number)
            if c.rank in lags and number % 2:
                time.sleep(0.05)  # the others overwrite what it has not read, if they can
            for dtype, shown in rooms.items():
                neighbours.wait_until_read()
                for each in shown:
                    each.own.copy_(shown_by(c.rank, number, each.own.numel(), dtype))
                neighbours.show(shown, mixing.targets(c.rank))
                sources = mixing.sources(c.rank)
                expected = [shown_by(source, number, size, dtype) for size in SIZES for source in sources]
                found = [part.clone() for part in neighbours.read(shown, sources)]
                assert all(map(torch.equal, found, expected)) and len(found) == len(expected), (c.rank, number)
                neighbours.finish()
            payloads.append(c.counters.total().payload - start)
            start = c.counters.total().payload
        return payloads, neighbours.bytes


NUMEL_BYTES = sum(SIZES) * (4 + 8)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_ranks_read_what_their_neighbours_show_and_nothing_else_is_sent(ranks, transport, world):
    for name in TOPOLOGIES:
        degree = {"ring": min(world - 1, 2), "exponential": (world - 1).bit_length()}.get(name, 1)
        for payloads, allocated in ranks(world).run(gossip, transport, name, (0, 1)):
            assert payloads == [degree * NUMEL_BYTES] * ROUNDS, (name, transport)
            inbox = 0 if transport == "host" else 2 * SIZES[0] * 8  # in place, nothing is received
            assert allocated == NUMEL_BYTES + inbox


def test_between_hosts_only_what_crosses_is_sent(hosts):
    """Of a ring of four on two hosts, every rank has one neighbour on its own."""
    for payloads, allocated in hosts(2, 2).run(gossip, "cluster", "ring", (3,)):
        assert payloads == [NUMEL_BYTES] * ROUNDS
        assert allocated == NUMEL_BYTES + 2 * SIZES[0] * 8
    for payloads, _ in hosts(2, 2).run(gossip, "cluster", "one-peer-exponential"):
        assert set(payloads) <= {0, NUMEL_BYTES}


def leaves(transport):
    """Rank 0 leaves after its round; rank 1 reads later. Then it needs rank 0 once more."""
    with connected(transport, timeout=20.0) as c:
        neighbours = Neighbours(c, CPU)
        shown = neighbours.room([torch.empty(200_000)])
        shown[0].own.fill_(c.rank + 1.0)
        if c.rank == 1 and transport == "host":
            time.sleep(0.5)
        neighbours.show(shown, [1 - c.rank])
        parts = neighbours.read(shown, [1 - c.rank])
        got = float(next(parts).sum())
        neighbours.finish()
        if c.rank == 0:
            return got
        try:
            neighbours.wait_until_read()
            neighbours.show(shown, [0])
            next(neighbours.read(shown, [0]))
        except CommError as error:
            return got, type(error).__name__, str(error)
    return got


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_a_neighbour_that_has_left_is_named_and_what_it_showed_is_not_lost(ranks, transport):
    first, (second, kind, text) = ranks(2).run(leaves, transport)
    assert (first, second) == (400_000.0, 200_000.0)
    assert kind == "PeerLost" and "rank 0" in text
