"""Which elements each owner holds: nothing is lost, nothing is held twice, and numpy agrees."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sherd.errors import ConfigError
from sherd.layout import BLOCK, Placement, Region, padded, regions
from sherd.layout.placement import share, sharer
from tests.layout.layouts import SHAPES, allowed, elements

pytestmark = pytest.mark.pure

quick = settings(max_examples=150, deadline=None)


@quick
@given(SHAPES, st.integers(1, 20), st.data())
def test_regions_partition_a_parameter(shape, owners, data):
    placement = data.draw(st.sampled_from(allowed(shape)))
    held = regions(shape, placement, owners, holder=owners - 1)
    assert len(held) == owners
    every = np.concatenate([elements(region) for region in held])
    assert sorted(every) == list(range(math.prod(shape)))


@quick
@given(st.lists(st.integers(0, 12), min_size=2, max_size=4).map(tuple), st.integers(1, 15))
def test_rows_and_columns_are_what_numpy_splits(shape, owners):
    array = np.arange(math.prod(shape)).reshape(shape)
    for axis, placement in enumerate((Placement.ROW, Placement.COLUMN)):
        expected = np.array_split(array, owners, axis)
        for part, region in zip(expected, regions(shape, placement, owners), strict=True):
            assert np.array_equal(array.reshape(-1)[elements(region)], part.reshape(-1))


@pytest.mark.parametrize("owners", range(1, 10))
def test_seven_rows_of_fifteen_lose_none(owners):
    matrix = np.arange(7 * 15).reshape(7, 15)
    held = [matrix.reshape(-1)[elements(region)].reshape(-1, 15) for region in regions((7, 15), Placement.ROW, owners)]
    assert np.array_equal(np.concatenate(held), matrix)
    rows = [len(part) for part in held]
    assert max(rows) - min(rows) <= 1 and rows == sorted(rows, reverse=True)


@quick
@given(st.integers(0, 5000), st.integers(1, 12))
def test_flat_regions_are_cut_between_blocks(numel, owners):
    for region in regions((numel,), Placement.FLAT, owners):
        assert region.start % BLOCK == 0
        assert region.numel == 0 or (region.start + region.length) % BLOCK == 0 or region.start + region.length == numel


@quick
@given(st.integers(1, 100), st.integers(1, 100))
def test_sharer_inverts_share(total, owners):
    for owner in range(owners):
        low, high = share(total, owners, owner)
        assert all(sharer(total, owners, item) == owner for item in range(low, high))


@quick
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_equal_sets_of_elements_are_equal_regions(start, length, gap, count):
    region = Region.of(start, length, length + gap, count)
    plain = elements(Region(start, length, length + gap, count))
    assert np.array_equal(elements(region), plain)
    assert region.numel == len(plain)
    assert [e for first, run in region.runs() for e in range(first, first + run)] == list(plain)
    if len(plain) == 0:
        assert region == Region(0, 0, 0, 0)
    elif plain[-1] - plain[0] + 1 == len(plain):
        assert region == Region(start, len(plain), len(plain), 1)


def test_a_whole_layer_is_on_its_holder_alone():
    assert [region.numel for region in regions((3, 5), Placement.LAYER, 4, holder=2)] == [0, 0, 15, 0]


def test_a_parameter_without_dimensions_is_one_row():
    assert [region.numel for region in regions((), Placement.ROW, 3)] == [1, 0, 0]


@pytest.mark.parametrize("shape", [(), (5,)])
def test_a_column_needs_two_dimensions(shape):
    with pytest.raises(ConfigError, match=r"needs two dimensions, found shape .*write placement 'row'"):
        regions(shape, Placement.COLUMN, 2)


def test_an_unknown_placement_suggests_the_nearest():
    with pytest.raises(ConfigError, match="unknown placement 'colum'; did you mean 'column'"):
        Placement.parse("colum")


@pytest.mark.parametrize(("numel", "expected"), [(0, 0), (1, 256), (255, 256), (256, 256), (257, 512)])
def test_padded_is_whole_blocks(numel, expected):
    assert padded(numel) == expected
