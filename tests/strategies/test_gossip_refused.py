"""What gossip refuses, and ranks that are gone or late: errors that say what to write, or name the rank."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import sherd
from sherd.errors import CommError, ConfigError
from sherd.testing import run_ranks
from tests.helpers.training import batch, connected, network, same, sgd, train, weights
from tests.strategies.test_gossip import DIRECTED

pytestmark = pytest.mark.ranks
RING = {"topology": "ring"}


def dies(transport):
    """Rank 2 is killed after a step; what the others get."""
    c = connected(transport)
    model, optimizer = network(), None
    model, optimizer = sherd.distribute(model, sgd(model), strategy=sherd.Gossip(**RING), comm=c)
    train(model, optimizer, [batch(c.rank)])
    if c.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for step in range(3):
            train(model, optimizer, [batch(c.rank, step)])
    except CommError as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_a_neighbour_that_dies_is_named(transport):
    *others, _ = run_ranks(dies, 3, transport, timeout=60, expected_exits={2: -signal.SIGKILL})
    for kind, text in others:
        assert kind == "PeerLost" and "rank 2" in text


def late():
    with connected(timeout=1.5) as c:
        model, optimizer = network(), None
        model, optimizer = sherd.distribute(model, sgd(model), strategy="gossip", comm=c)
        train(model, optimizer, [batch(c.rank)])
        if c.rank == 1:
            time.sleep(4)
        try:
            train(model, optimizer, [batch(c.rank)])
        except CommError as error:
            return type(error).__name__, str(error)
    return None


def test_a_neighbour_that_is_late_is_named(ranks):
    (kind, text), (other, _) = ranks(2).run(late)
    assert kind == "TimedOut" and "rank 1" in text and other == "TimedOut"


def refused(topology):
    with connected() as c:
        model = network()
        try:
            sherd.distribute(model, sgd(model), strategy=sherd.Gossip(topology=topology), comm=c)
        except ConfigError as error:
            return str(error)
    return ""


def without_its_optimizer():
    with connected() as c:
        model = sherd.distribute(network(), strategy="gossip", comm=c)
        try:
            train(model, sgd(model), [batch(c.rank)])
        except ConfigError as error:
            return str(error)
    return ""


def test_an_optimizer_that_was_not_passed_would_never_mix(ranks):
    for text in ranks(2).run(without_its_optimizer):
        assert "was not passed to sherd.distribute" in text and "train alone for ever" in text


THIRDS = [[1 / 3] * 3] * 3


def test_a_matrix_for_another_number_of_ranks_is_refused(ranks):
    for text in ranks(2).run(refused, THIRDS):
        assert "the mixing matrix is for 3 ranks, but there are 2" in text


@pytest.mark.fake
def test_alone_a_matrix_for_many_is_fine():
    model = network()
    model, optimizer = sherd.distribute(model, sgd(model), strategy=sherd.Gossip(topology=THIRDS))
    train(model, optimizer, [batch(0)])
    own = network()
    train(own, sgd(own), [batch(0)])
    same(weights(model), weights(own))


@pytest.mark.pure
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0 must be at least 1"),
        ({"warmup": -1}, "warmup=-1 must be at least 0"),
        ({"topology": "rings"}, "unknown topology='rings'; did you mean 'ring'"),
        ({"topology": [[0.5, 0.4], [0.4, 0.5]]}, "loses mass"),
        ({"topology": DIRECTED}, "column stochastic.*write push_sum=True"),
        ({"topology": [[0.0, 1.0], [1.0, 0.0]]}, "positive diagonal"),
        ({"topology": [[1.0, 0.0], [0.0, 1.0]]}, "not connected"),
        ({"topology": 3}, "one row of numbers per rank"),
        ({"toplogy": "ring"}, "has no option 'toplogy'; did you mean 'topology'"),
        ({"push_sum": 1}, "push_sum=1 must be of type bool"),
    ],
)
def test_options_that_cannot_be_right_get_one_clear_error(options, message):
    with pytest.raises(ConfigError, match=message):
        sherd.Gossip(**options)


@pytest.mark.pure
def test_other_libraries_names_lead_here():
    for name in ("D-PSGD", "dpsgd", "SGP", "decentralized", "neighbor_allreduce"):
        with pytest.raises(ConfigError, match="here it is called 'gossip'"):
            sherd.strategies.resolve(name)
    assert sherd.Gossip(topology=torch.full((2, 2), 0.5)) == sherd.Gossip(topology=[[0.5, 0.5], [0.5, 0.5]])
