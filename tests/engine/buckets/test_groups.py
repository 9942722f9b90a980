"""Who holds what: patterns, one order of all parameters, and norms over ranks that hold different ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sherd.config import StepOptions
from sherd.engine.buckets.bucket_list import BucketList
from sherd.engine.buckets.catalogue import Listed
from sherd.engine.buckets.groups import Groups
from sherd.engine.buckets.order import merged
from sherd.engine.buckets.tracked import TrackedParameter
from sherd.errors import ConfigError
from sherd.layout.placement import BLOCK

pytestmark = pytest.mark.fake


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"a.*": []}, "a list of ranks for each pattern, found \\[\\] for 'a.\\*'"),
        ({"a.*": "01"}, "a list of ranks for each pattern, found '01'"),
        ({"a.*": 1}, "a list of ranks for each pattern, found 1"),
        ({"a.*": [0, 0]}, "without repeats, found \\[0, 0\\]"),
        ({"a.*": [0, -1]}, "made of ranks, found -1"),
        ({"a.*": [0, 1.0]}, "made of ranks, found 1.0"),
        ({"a.*": [True]}, "made of ranks, found True"),
        ({"": [0]}, "about names of parameters, found ''"),
        ([("a.*", [0])], "of type Mapping or None, not list"),
    ],
)
def test_options_that_cannot_be_groups(groups, message):
    with pytest.raises(ConfigError, match=f"groups=.* must be {message}.*") as caught:
        StepOptions(groups=groups)
    assert "of type" in message or 'write groups={"experts.0.*": [0, 1]}' in str(caught.value)


def test_groups_are_the_same_in_any_order():
    assert StepOptions(groups={"a.*": [2, 0]}) == StepOptions(groups={"a.*": range(0, 3, 2)})


def test_ranks_of_a_name():
    groups = Groups({"a.*": (0, 2), "a.0.*": (0, 2), "*.all": (0, 1, 2)}, 3)
    assert groups.ranks_of("a.0.weight") == (0, 2)
    assert groups.ranks_of("b.all") is None and groups.ranks_of("b.weight") is None
    with pytest.raises(ConfigError, match=r"'a.all' matches 'a.\*' with ranks \[0, 2\] and '\*.all' with ranks"):
        groups.ranks_of("a.all")
    assert not Groups() and Groups().ranks_of("a") is None


@given(st.lists(st.lists(st.integers(0, 9), unique=True), max_size=4))
def test_one_order_has_everything_once(orders):
    found = merged(orders)
    assert sorted(found) == sorted({each for order in orders for each in order})
    assert merged(orders[:1]) == [each for order in orders[:1] for each in order]


@given(st.permutations(range(10)), st.lists(st.sets(st.integers(0, 9)), max_size=5))
def test_lists_in_one_order_keep_it(order, parts):
    orders = [[each for each in order if each in part] for part in parts]
    found = merged(orders)
    for each in orders:
        assert [thing for thing in found if thing in each] == each


def lists(world, holders, whole=(), shapes=((7, 15), (40, 30), (3,), (600,), (5, 5))):
    """The buckets of every rank, each of which has the parameters that it holds; those in `whole` have one owner."""
    values = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    found = []
    for rank in range(world):
        every = []
        for at, (value, ranks) in enumerate(zip(values, holders, strict=True)):
            member = TrackedParameter(f"p{at}", nn.Parameter(value), ranks)
            member.entry = replace(member.entry, placement="layer" if at in whole else "flat")
            held = ranks is None or rank in ranks
            every.append(Listed(member.entry, True, ranks, None, 0, member if held else None))
        members = [each.member for each in every if each.member is not None]
        found.append(BucketList.pack(members, world, world, 1024, (), every, rank))
    return found, values


class Gathered:
    """A communicator that has gathered the tables of all ranks."""

    def __init__(self, tables):
        self.table = torch.cat(tables)

    @property
    def counters(self):
        return self

    def agreeing(self):
        return torch.no_grad()

    def all_gather(self, _):
        return self

    def wait(self):
        return self.table


GROUPS = st.none() | st.sets(st.integers(0, 3), min_size=1).map(lambda ranks: tuple(sorted(ranks)))


@given(st.lists(GROUPS, min_size=5, max_size=5), st.sets(st.integers(0, 4)))
def test_a_norm_has_the_same_bits_whoever_holds_what(holders, owned_whole):
    norms = []
    for held, whole in ((holders, owned_whole), ([None] * 5, ()), ([None] * 5, owned_whole)):
        torch.manual_seed(0)
        every, values = lists(4, held, whole)
        for rank, buckets in enumerate(every):
            for bucket in buckets.buckets:
                flat = torch.zeros(bucket.described.numel, dtype=torch.float64)
                for member in bucket.members:
                    member.shaped_in(flat).copy_(values[int(member.name[1:])])
                low, high = bucket.described.span(bucket.described.owner_of(rank))
                slice = flat[low:high]
                bucket.norms.copy_(torch.linalg.vector_norm(slice.view(len(slice) // BLOCK, BLOCK), dim=1))
        tables = [buckets.table.norms for buckets in every]
        assert len({len(table) for table in tables}) == 1, "they are gathered"
        norms += [buckets.table.total(Gathered(tables)) for buckets in every]
    assert len(set(norms)) == 1
    whole = torch.linalg.vector_norm(torch.cat([value.reshape(-1) for value in values]))
    assert norms[0] == pytest.approx(whole.item(), rel=1e-12)


@given(st.lists(GROUPS, min_size=5, max_size=5))
def test_all_ranks_pack_alike(holders):
    every, _ = lists(4, holders)
    for rank, buckets in enumerate(every):
        assert buckets.layout == every[0].layout
        assert buckets.grouped == any(ranks is not None for ranks in holders)
        assert [slot for slot in buckets.slots if slot is not None] == list(buckets.buckets)
        for described, slot in zip(buckets.layout.buckets, buckets.slots, strict=True):
            assert (slot is None) == (described.owner_of(rank) is None)
        for listed, member in zip(buckets.catalogue, buckets.entries, strict=True):
            assert (member is None) == (listed.ranks is not None and rank not in listed.ranks)
        order = range(len(buckets.layout.buckets) - 1, -1, -1)
        assert buckets.launched_in(order).launch_order == buckets.buckets[::-1]
