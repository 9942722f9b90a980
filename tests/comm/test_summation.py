"""The summation tree against plain Python loops, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sherd.comm.codec import Cast
from sherd.comm.summation import SUM_BLOCK, SummationTree, combine, cut_for
from sherd.errors import ConfigError
from tests.helpers.comm_reference import DTYPES, OPERATORS, reduced, tensor_of

pytestmark = pytest.mark.pure


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_combine_follows_the_tree_to_the_last_bit(data):
    world = data.draw(st.integers(1, 9))
    group = data.draw(st.integers(1, world))
    numel = data.draw(st.sampled_from((0, 1, 7, 255, SUM_BLOCK, SUM_BLOCK + 1, 2 * SUM_BLOCK + 3)))
    dtype = data.draw(st.sampled_from(DTYPES))
    op = data.draw(st.sampled_from(sorted(OPERATORS)))
    out_dtype = data.draw(st.sampled_from((dtype, torch.float64))) if dtype.is_floating_point else dtype
    parts = [tensor_of(r, (numel,), dtype, seed=data.draw(st.integers(0, 5))) for r in range(world)]
    expected = reduced(parts, group, op, out_dtype)
    out = torch.empty(numel, dtype=out_dtype)
    combine(SummationTree(world, group), parts, out, op)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("numel", [5, SUM_BLOCK + 5])
def test_the_output_may_be_any_of_the_parts(world, numel):
    for place in range(world):
        parts = [tensor_of(r, (numel,), torch.float32) for r in range(world)]
        expected = reduced(parts, world)
        combine(SummationTree(world, world), parts, parts[place])
        assert torch.equal(parts[place], expected)


def test_the_order_matters_so_these_tests_can_fail():
    parts = [tensor_of(r, (1000,), torch.float32) for r in range(6)]
    assert not torch.equal(reduced(parts, 6), reduced(parts, 2))
    assert not torch.equal(reduced(parts, 6), reduced(parts[::-1], 6))


@given(world=st.integers(1, 40), group=st.integers(1, 40))
def test_groups_partition_the_ranks_in_order(world, group):
    if group > world:
        with pytest.raises(ConfigError, match="groups of"):
            SummationTree(world, group)
        return
    assert [r for ranks in SummationTree(world, group).groups for r in ranks] == list(range(world))


@given(numel=st.integers(0, 10**6), world=st.integers(1, 64))
def test_slices_of_an_all_reduce_cover_everything(numel, world):
    cut = cut_for(numel, world, Cast(torch.bfloat16))
    assert cut * world >= numel
    assert (cut - 64) * world < max(numel, 1)
