"""An object for each rank, of any size; and numbers that ranks draw from their store."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed import HashStore

from sherd import CommOptions, comm
from sherd.comm.meeting.tickets import ENDED, Tickets
from sherd.comm.parcels import exchange_objects
from sherd.errors import ConfigError


class Own:
    def __init__(self, rank):
        self.rank = rank


def exchanged(transport):
    with comm.connect(CommOptions(transport=transport)) as ranks:
        parcels = [{"from": ranks.rank, "rows": torch.full((1000 * to * ranks.rank,), to)} for to in range(ranks.world)]
        received = exchange_objects(ranks, parcels)
        for sender, parcel in enumerate(received):
            assert parcel["from"] == sender
            assert torch.equal(parcel["rows"], torch.full((1000 * ranks.rank * sender,), ranks.rank))
        return ranks.transport


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_every_rank_gets_what_is_meant_for_it(ranks, transport):
    assert ranks(3).run(exchanged, transport) == [transport] * 3


def objects_of_own(hosts):
    """Rank 1 sends an object of a class of its own to rank 0."""
    if hosts > 1:
        os.environ["SHERD_HOST"] = f"machine-{os.environ['RANK']}"
    with comm.connect(CommOptions.from_env(transport="c10d")) as ranks:
        parcels = [Own(ranks.rank) if ranks.rank == 1 else "plain"] * ranks.world
        try:
            found = [getattr(each, "rank", each) for each in exchange_objects(ranks, parcels)]
        except ConfigError as error:
            found = str(error)
        return found, ranks.all_gather_object(ranks.rank)


def test_pickles_are_sealed_or_refused_on_every_rank(ranks):
    assert ranks(2).run(objects_of_own, 1) == [(["plain", 1], [0, 1])] * 2, "ranks of one host have a key"
    for found, after in ranks(2).run(objects_of_own, 2, env={"SHERD_TOKEN": ""}):
        assert "rank 1 passed a tests.comm.test_parcels.Own, which has to be pickled" in found
        assert after == [0, 1], "the communicator can still be used"


def draws(transport):
    with comm.connect(CommOptions(transport=transport)) as ranks:
        tickets = Tickets(ranks.store, "a name")
        mine = [tickets.draw() for _ in range(20)]
        ranks.barrier().wait()
        if ranks.rank == 0:
            tickets.end()
        ranks.barrier().wait()
        assert tickets.draw() is None
        ranks.barrier().wait()
        tickets.close(forget=ranks.rank == 0)
        return mine


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_each_number_is_drawn_once(ranks, transport):
    found = ranks(3).run(draws, transport)
    assert sorted(number for mine in found for number in mine) == list(range(60))
    assert all(mine == sorted(mine) for mine in found)


@pytest.mark.pure
def test_what_a_store_counts_is_not_believed():
    store = HashStore()
    tickets = Tickets(store, "name")
    assert [tickets.draw(), tickets.draw()] == [0, 1]
    for strange in (-5, ENDED, 1 << 62):
        store.set("sherd/tickets/name", str(strange))
        assert tickets.draw() is None
    store.set("sherd/tickets/name", "words")  # torch cannot count these
    assert tickets.draw() is None
    tickets.close(forget=True)
    assert tickets.draw() is None, "it is closed"
