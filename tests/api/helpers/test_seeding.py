"""Seeds: the same on all ranks until distribute, then one per rank."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

import sherd
from sherd import ConfigError
from tests.helpers.loaders import Numbers
from tests.helpers.training import network, sgd

pytestmark = pytest.mark.pure


def drawn():
    return torch.rand(1).item(), random.random(), float(numpy.random.random())


def seeds():
    model, other, third = network(), network(), network()
    sherd.seed(5)
    alike = drawn()
    loader = DataLoader(Numbers(8), 2, shuffle=True)
    sherd.distribute(model, sgd(model), loader, strategy="ddp")
    after = drawn()
    rows = sherd.gather(torch.cat(list(loader))).tolist()
    torch.manual_seed(1)
    sherd.distribute(other, strategy="ddp")  # a second time nothing is seeded
    same = torch.rand(1).item()
    sherd.seed(5)  # another trial
    again = drawn()
    sherd.distribute(third, strategy="ddp")
    return alike, after, rows, same, again, drawn()


def test_ranks_are_seeded_alike_until_distribute_then_by_rank(ranks):
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    first, second = drawn(), drawn()
    (alike, after, rows, same, again, after_again), *others = ranks(3).run(seeds)
    assert again == alike == first and after_again == after == second  # rank 0 goes on as one process would
    assert sorted(rows) == list(range(8))
    for other in others:
        assert other[0] == other[4] == alike and other[2] == rows and other[3] == same
        assert other[1] == other[5] and not set(other[1]) & set(after)
    assert others[0][1] != others[1][1]


def not_seeded():
    model = network()
    torch.manual_seed(3)
    sherd.distribute(model, strategy="ddp")
    return torch.rand(1).item()


def test_without_a_seed_distribute_seeds_nothing(ranks):
    one, two = ranks(2).run(not_seeded)
    assert one == two


@pytest.mark.parametrize("n", [-1, 1.0, True, "1", 1 << 63])
def test_seeds_that_are_none_are_refused(n):
    with pytest.raises(ConfigError, match=r"write a whole number from 0 to 2\*\*63 - 1"):
        sherd.seed(n)
