"""Pieces of buckets: every element once and in its place, whatever the size of a slot."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sherd.errors import ConfigError
from sherd.layout import BLOCK, Entry, Placement, ShardLayout
from sherd.layout.pieces import PADDING, cut_by_slice, cut_whole, largest_by_slice, largest_whole
from tests.layout.layouts import BUCKET_NUMELS, WORLDS, models

pytestmark = pytest.mark.pure

quick = settings(max_examples=50, deadline=None)
SLOTS = st.sampled_from([1, 255, 256, 257, 700, 1024, 1300, 4096, 1 << 22])
NOTHING = (PADDING, 0)


@st.composite
def layouts(draw):
    entries = draw(models((Placement.FLAT, Placement.LAYER)))
    order = draw(st.permutations(range(len(entries))))
    return ShardLayout.build(entries, draw(WORLDS), bucket_numel=draw(BUCKET_NUMELS), order=order)


def by_slice(layout, bucket):
    """What each owner's slice holds, element by element: (entry, element), or NOTHING where it is padding."""
    places = [np.full((bucket.owned_numel(owner), 2), NOTHING) for owner in range(layout.world)]
    for entry in bucket.members:
        for element in range(layout.entries[entry].numel):
            place = layout.locate(entry, element)
            assert place.bucket == bucket.index
            assert tuple(places[place.owner][place.offset]) == NOTHING
            places[place.owner][place.offset] = entry, element
    return places


def whole(layout, bucket):
    """What the bucket holds, all slices laid end to end."""
    places = np.full((bucket.numel, 2), NOTHING)
    for entry in bucket.members:
        begin, numel = layout.bucket_offset(entry), layout.entries[entry].numel
        places[begin : begin + numel, 0] = entry
        places[begin : begin + numel, 1] = np.arange(numel)
    return places


def laid_out(piece, layout):
    """The elements that a piece carries, in their order."""
    parts = [np.empty((0, 2), int)]
    for entry, start, stop in itertools.chain(*piece.parts):
        assert start < stop
        if entry == PADDING:
            parts.append(np.full((stop - start, 2), NOTHING))
            continue
        assert 0 <= start < stop <= layout.entries[entry].numel
        parts.append(np.stack([np.full(stop - start, entry), np.arange(start, stop)], axis=1))
    carried = np.concatenate(parts)
    assert len(carried) == piece.numel
    return carried


def check_steps(pieces, size, most):
    """Pieces follow one another from 0 to `size`, whole blocks each, as few as `most` elements of each allow."""
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces)][: len(pieces)]
    assert (pieces[-1].stop if pieces else 0) == size
    assert all((piece.stop - piece.start) % BLOCK == 0 for piece in pieces)
    assert all(0 < piece.stop - piece.start <= most for piece in pieces)
    assert len(pieces) == -(-size // most)


@quick
@given(layouts(), SLOTS)
def test_a_piece_is_the_same_part_of_every_slice(layout, slot):
    for bucket in layout.buckets:
        pieces = cut_by_slice(bucket, slot)
        places = by_slice(layout, bucket)
        owners = layout.world if bucket.holder is None else 1  # that have something of it
        for piece in pieces:
            assert len(piece.parts) == layout.world
            assert piece.numel == (piece.stop - piece.start) * owners
            assert piece.numel <= max(slot, BLOCK * owners)
            expected = np.concatenate([each[piece.start : piece.stop] for each in places])
            assert np.array_equal(laid_out(piece, layout), expected)
            for owner, part in enumerate(piece.parts):
                assert bool(part) == (bucket.holder in (None, owner))
        check_steps(pieces, bucket.slice_numel, max(slot // owners // BLOCK, 1) * BLOCK)
        assert largest_by_slice(bucket, slot) == max((piece.numel for piece in pieces), default=0)


@quick
@given(layouts(), SLOTS)
def test_a_piece_is_a_run_of_the_whole_bucket(layout, slot):
    for bucket in layout.buckets:
        pieces = cut_whole(bucket, slot)
        places = whole(layout, bucket)
        for piece in pieces:
            assert piece.numel == piece.stop - piece.start
            assert piece.numel <= max(slot, BLOCK)
            assert np.array_equal(laid_out(piece, layout), places[piece.start : piece.stop])
        check_steps(pieces, bucket.numel, max(slot // BLOCK, 1) * BLOCK)
        assert largest_whole(bucket, slot) == max((piece.numel for piece in pieces), default=0)


@quick
@given(layouts(), SLOTS)
def test_both_cuts_carry_every_element_once(layout, slot):
    for cut in (cut_by_slice, cut_whole):
        times = [np.zeros(entry.numel, int) for entry in layout.entries]
        padding = 0
        for bucket in layout.buckets:
            for piece in cut(bucket, slot):
                for entry, start, stop in itertools.chain(*piece.parts):
                    if entry == PADDING:
                        padding += stop - start
                    else:
                        times[entry][start:stop] += 1
        assert all((count == 1).all() for count in times)
        assert padding == layout.padded_numel - layout.numel


@quick
@given(layouts())
def test_a_bucket_that_fits_is_one_piece(layout):
    for bucket in layout.buckets:
        if bucket.numel:
            assert len(cut_by_slice(bucket, bucket.numel)) == len(cut_whole(bucket, bucket.numel)) == 1
        else:
            assert cut_by_slice(bucket, 1) == cut_whole(bucket, 1) == ()


@pytest.mark.parametrize("placement", [Placement.ROW, Placement.COLUMN])
@pytest.mark.parametrize("cut", [cut_by_slice, cut_whole])
def test_rows_and_columns_are_not_reduced_in_pieces(placement, cut):
    layout = ShardLayout.build([Entry("w", (7, 15), placement=placement)], 2)
    with pytest.raises(ConfigError, match=f"bucket 0 has placement '{placement.value}'"):
        cut(layout.buckets[0], 1024)
