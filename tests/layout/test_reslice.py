"""From any layout to any other and back, with real arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sherd.errors import ConfigError
from sherd.layout import Entry, Move, Placement, ShardLayout, moves
from tests.layout.layouts import PADDING, Slices, arrays, cut, empty_slices, models, relayouts

pytestmark = pytest.mark.pure

quick = settings(max_examples=100, deadline=None)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[ShardLayout, ShardLayout]:
    """Two layouts of the same parameters."""
    entries = draw(models())
    return draw(relayouts(entries)), draw(relayouts(entries))


def reslice(src: ShardLayout, slices: Slices, dst: ShardLayout) -> Slices:
    """Carry out the moves, and see that none writes where another did."""
    out = empty_slices(dst)
    for move in moves(src, dst):
        into = out[move.dst_bucket, move.dst_owner][move.dst_offset : move.dst_offset + move.length]
        assert len(into) == move.length > 0
        assert (into == PADDING).all()
        into[:] = slices[move.src_bucket, move.src_owner][move.src_offset : move.src_offset + move.length]
    return out


def same(found: Slices, expected: Slices) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[key], expected[key]) for key in expected)


@quick
@given(pairs())
def test_there_is_right_and_back_is_the_identity(pair):
    a, b = pair
    values = arrays(a.entries)
    start = cut(a, values)
    there = reslice(a, start, b)
    assert same(there, cut(b, values))
    assert same(reslice(b, there, a), start)


@quick
@given(pairs())
def test_moves_say_which_parameter(pair):
    a, b = pair
    values = arrays(a.entries)
    start = cut(a, values)
    for move in moves(a, b):
        part = start[move.src_bucket, move.src_owner][move.src_offset : move.src_offset + move.length]
        assert np.isin(part, values[move.entry]).all()
    assert sum(move.length for move in moves(a, b)) == a.numel


@quick
@given(pairs())
def test_one_owner_asks_for_its_own_moves(pair):
    a, b = pair
    every = list(moves(a, b))
    assert [move for owner in range(b.world) for move in moves(a, b, dst_owner=owner)] == every
    order = [(move.dst_owner, move.dst_bucket, move.dst_offset) for move in every]
    assert order == sorted(order)


@quick
@given(pairs())
def test_runs_that_follow_are_one_move(pair):
    for first, second in itertools.pairwise(moves(*pair)):
        continued = first._replace(
            src_offset=first.src_offset + first.length, dst_offset=first.dst_offset + first.length, length=second.length
        )
        assert second != continued


@quick
@given(models().flatmap(relayouts))
def test_to_itself_is_one_move_per_segment(layout):
    expected = [
        Move(layout.entries[s.entry].name, owner, s.bucket, s.offset, owner, s.bucket, s.offset, s.numel)
        for owner in range(layout.world)
        for s in layout.segments(owner)
    ]
    assert list(moves(layout, layout)) == expected


@pytest.mark.parametrize("owners", range(1, 10))
def test_seven_rows_of_fifteen_go_to_any_world_and_back(owners):
    a = ShardLayout.build([Entry("w", (7, 15), placement=Placement.ROW)], 2)
    b = ShardLayout.build([Entry("w", (7, 15), placement=Placement.ROW)], owners)
    start = cut(a, arrays(a.entries))
    assert same(reslice(b, reslice(a, start, b), a), start)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([Entry("a", (4,))], "'b' only in the source, none only in the destination"),
        ([Entry("a", (4,)), Entry("c", (6,))], "'b' only in the source, 'c' only in the destination"),
        ([Entry("a", (4,)), Entry("b", (3, 2))], r"'b' has shape \(6,\) in the source and \(3, 2\) in the destination"),
        ([Entry("a", (4,)), Entry("b", (6,), "bfloat16")], "'b' has dtype float32 in the source and bfloat16"),
        ([Entry(f"p{n}", (4,)) for n in range(9)], "'p4' and 4 more only in the destination"),
    ],
)
def test_layouts_of_different_parameters_are_refused_at_once(entries, message):
    src = ShardLayout.build([Entry("a", (4,)), Entry("b", (6,))], 2)
    with pytest.raises(ConfigError, match=message):
        moves(src, ShardLayout.build(entries, 2))


def test_an_owner_that_is_not_there_is_refused():
    layout = ShardLayout.build([Entry("a", (4,))], 2)
    with pytest.raises(ConfigError, match="no owner 2"):
        list(moves(layout, layout, dst_owner=2))
