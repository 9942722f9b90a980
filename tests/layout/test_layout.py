"""The layout: every element in one segment, every block in one place, slices equal."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sherd.comm.summation import SummationTree
from sherd.errors import ConfigError
from sherd.layout import BLOCK, ITEMSIZE, Entry, Placement, ShardLayout, padded
from tests.layout.layouts import BUCKET_NUMELS, PADDING, WORLDS, arrays, cut, elements, layouts, models

pytestmark = pytest.mark.pure

quick = settings(max_examples=80, deadline=None)
BLOCKWISE = (Placement.FLAT, Placement.LAYER)


@quick
@given(layouts)
def test_every_element_is_in_exactly_one_segment(layout):
    times = [np.zeros(entry.numel, int) for entry in layout.entries]
    for owner in range(layout.world):
        for segment in layout.segments(owner):
            assert segment.owner == owner
            assert segment.numel > 0
            np.add.at(times[segment.entry], elements(segment.region), 1)
    for count in times:
        assert (count == 1).all()


@quick
@given(layouts)
def test_segments_lie_apart_in_their_slice_and_begin_on_blocks(layout):
    for owner in range(layout.world):
        for bucket in layout.buckets:
            end = 0
            for segment in layout.segments(owner, bucket.index):
                assert segment.offset >= end
                assert segment.offset % BLOCK == 0
                end = segment.offset + segment.blocks * BLOCK
            assert end <= bucket.slice_numel


@quick
@given(layouts)
def test_slices_are_equal_and_whole_blocks(layout):
    for bucket in layout.buckets:
        assert bucket.slice_numel % BLOCK == 0
        assert bucket.numel == bucket.world * bucket.slice_numel
        # Equal, and no longer than the fullest owner needs; a flat bucket is full but for less than one block each.
        used = [sum(s.blocks for s in layout.segments(owner, bucket.index)) for owner in range(layout.world)]
        if bucket.placement is Placement.FLAT:
            assert bucket.numel - sum(used) * BLOCK < bucket.world * BLOCK
        else:
            assert max(used) * BLOCK == bucket.slice_numel


@quick
@given(layouts)
def test_locate_and_segments_agree(layout):
    values = arrays(layout.entries)
    slices = cut(layout, values)
    for index, entry in enumerate(layout.entries):
        for element in range(entry.numel):
            place = layout.locate(index, element)
            there = slices[place.bucket, place.owner][place.offset : place.offset + place.length]
            assert place.length >= 1
            assert np.array_equal(there, values[entry.name][element : element + place.length])
        places = list(layout.places(index, 0, entry.numel))
        parts = [slices[p.bucket, p.owner][p.offset : p.offset + p.length] for p in places]
        assert np.array_equal(np.concatenate([*parts, []]), values[entry.name])


@quick
@given(layouts)
def test_segments_of_an_entry_are_those_of_its_owners(layout):
    by_owner = [segment for owner in range(layout.world) for segment in layout.segments(owner)]
    by_entry = [segment for entry in range(len(layout.entries)) for segment in layout.segments_of(entry)]
    assert sorted(by_entry) == sorted(by_owner, key=lambda segment: segment[:3])
    for entry in range(len(layout.entries)):
        owners = [segment.owner for segment in layout.segments_of(entry)]
        assert owners == sorted(set(owners))


@quick
@given(layouts)
def test_every_block_has_one_place_and_a_number(layout):
    found = [block for owner in range(layout.world) for block in layout.blocks(owner)]
    numbers = sorted(layout.first_block(block.entry) + block.block for block in found)
    assert numbers == list(range(layout.total_blocks))
    places = [(segment.bucket, owner) for owner in range(layout.world) for segment in layout.segments(owner)]
    assert {block.bucket for block in found} == {bucket for bucket, _ in places}
    assert all(block.offset % BLOCK == 0 for block in found)


@quick
@given(models(BLOCKWISE), WORLDS, BUCKET_NUMELS)
def test_blocks_of_flat_and_layer_are_the_same_whatever_the_world(entries, world, bucket_numel):
    layout = ShardLayout.build(entries, world, bucket_numel=bucket_numel)
    found = Counter((block.entry, block.block) for owner in range(world) for block in layout.blocks(owner))
    expected = [(e, b) for e, entry in enumerate(entries) for b in range(padded(entry.numel) // BLOCK)]
    assert found == Counter(expected)


@settings(max_examples=40, deadline=None)
@given(models(BLOCKWISE), BUCKET_NUMELS, st.integers(0, 99))
def test_norms_have_the_same_bits_whatever_the_world(entries, bucket_numel, seed):
    numel = sum(entry.numel for entry in entries)
    noise = np.random.default_rng(seed).lognormal(sigma=4, size=numel)
    norms = set()
    for world in (1, 2, 3, 7):
        layout = ShardLayout.build(entries, world, bucket_numel=bucket_numel)
        ids = cut(layout, arrays(entries))
        table = np.full(layout.total_blocks, np.nan)
        for owner in range(world):
            for entry, block, bucket, offset in layout.blocks(owner):
                part = ids[bucket, owner][offset : offset + BLOCK]
                real = np.where(part == PADDING, 0.0, noise[part] if numel else 0.0)
                table[layout.first_block(entry) + block] = np.square(real).sum()
        assert not np.isnan(table).any()
        norms.add(sum(table.tolist()))
    assert len(norms) == 1


@quick
@given(models(), WORLDS, BUCKET_NUMELS)
def test_buckets_keep_the_order_and_one_kind(entries, world, bucket_numel):
    layout = ShardLayout.build(entries, world, bucket_numel=bucket_numel)
    assert sorted(m for bucket in layout.buckets for m in bucket.members) == list(range(len(entries)))
    last = [bucket.members[-1] for bucket in layout.buckets]
    assert last == sorted(last)
    for bucket in layout.buckets:
        assert list(bucket.members) == sorted(bucket.members)
        assert {(e.dtype, e.placement) for e in bucket.entries} == {(bucket.dtype, bucket.placement)}
        sizes = [padded(entry.numel) for entry in bucket.entries]
        limit = max(bucket_numel, max(sizes) * (world if bucket.placement is Placement.LAYER else 1))
        assert sum(sizes) <= limit
        assert all(layout.bucket_of(m) == bucket for m in bucket.members)


@quick
@given(models((Placement.FLAT,)), WORLDS, BUCKET_NUMELS)
def test_offsets_in_a_flat_bucket_do_not_depend_on_the_world(entries, world, bucket_numel):
    alone = ShardLayout.build(entries, 1, bucket_numel=bucket_numel)
    layout = ShardLayout.build(entries, world, bucket_numel=bucket_numel)
    assert [b.members for b in alone.buckets] == [b.members for b in layout.buckets]
    for entry in range(len(entries)):
        assert layout.bucket_offset(entry) == alone.bucket_offset(entry)
    assert 0 <= layout.padded_numel - alone.padded_numel < world * BLOCK * max(1, len(layout.buckets))


@quick
@given(models(BLOCKWISE), WORLDS, BUCKET_NUMELS)
def test_a_bucket_offset_counts_over_all_slices(entries, world, bucket_numel):
    layout = ShardLayout.build(entries, world, bucket_numel=bucket_numel)
    values = arrays(entries)
    slices = cut(layout, values)
    for index, entry in enumerate(entries):
        bucket, begin = layout.bucket_of(index).index, layout.bucket_offset(index)
        whole = np.concatenate([slices[bucket, owner] for owner in range(world)])
        assert np.array_equal(whole[begin : begin + entry.numel], values[entry.name])


@quick
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=30), WORLDS, BUCKET_NUMELS)
def test_whole_layers_are_balanced(numels, world, bucket_numel):
    entries = [Entry(f"p{n}", (numel,), "float32", Placement.LAYER) for n, numel in enumerate(numels)]
    layout = ShardLayout.build(entries, world, bucket_numel=bucket_numel)
    assert layout == ShardLayout.build(entries, world, bucket_numel=bucket_numel)
    for bucket in layout.buckets:
        sizes = [padded(entry.numel) for entry in bucket.entries]
        assert bucket.slice_numel <= sum(sizes) / world + max(sizes)
    assert all(len(layout.segments_of(entry)) == 1 for entry in range(len(entries)))


def test_equal_layers_fill_every_owner_without_padding():
    entries = [Entry(f"p{n}", (64, 64), "float32", Placement.LAYER) for n in range(12)]
    layout = ShardLayout.build(entries, 4, bucket_numel=1)
    assert [len(bucket.members) for bucket in layout.buckets] == [4, 4, 4]
    assert layout.padded_numel == layout.numel


@quick
@given(layouts)
def test_bytes_of_an_owner_are_those_of_its_slices(layout):
    for owner in range(layout.world):
        expected: Counter[str] = Counter()
        for bucket in layout.buckets:
            if bucket.ranks is None or owner in bucket.ranks:
                expected[bucket.dtype] += bucket.slice_numel * ITEMSIZE[bucket.dtype]
        assert layout.owner_bytes(owner) == dict(expected)
    assert layout.numel <= layout.padded_numel
    assert layout.padded_numel == sum(a.size for a in cut(layout, arrays(layout.entries)).values())


def test_itemsizes_are_torchs():
    torch = pytest.importorskip("torch")
    assert all(getattr(torch, name).itemsize == size for name, size in ITEMSIZE.items())


def test_a_thousand_parameters_on_a_thousand_owners():
    kinds = [kind for _ in range(250) for kind in Placement]
    entries = [Entry(f"p{n}", (1024 + n % 7, 1000), "bfloat16", kind) for n, kind in enumerate(kinds)]
    layout = ShardLayout.build(entries, 1024)
    for entry in (*range(4), *range(996, 1000)):
        assert sum(segment.numel for segment in layout.segments_of(entry)) == entries[entry].numel
    rows = [segment for segment in layout.segments(1023) if entries[segment.entry].placement is Placement.ROW]
    assert [segment.numel for segment in rows] == [1000] * 250


# The tree


def test_the_tree_is_part_of_the_layout():
    layout = ShardLayout.build([Entry("p", (3,))], 6, group=4)
    assert layout.tree == SummationTree(world=6, group=4)
    assert ShardLayout.build([], 6).tree == SummationTree(world=6, group=6)
    assert layout != ShardLayout.build([Entry("p", (3,))], 6, group=2)


# What cannot be right is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShardLayout.build([], 0), "at least one rank"),
        (lambda: ShardLayout.build([], 2, group=3), "cannot have groups of 3"),
        (lambda: ShardLayout.build([], 2, bucket_numel=0), "bucket_numel=0 holds nothing"),
        (lambda: ShardLayout.build([Entry("a", (1,)), Entry("a", (2,))], 2), r"more than one of \['a'\]"),
        (lambda: Entry("a", (-1,)), r"'a' has shape \(-1,\)"),
        (lambda: Entry("a", (1,), "torch.float32"), "'a' has dtype 'torch.float32'; did you mean 'float32'"),
        (lambda: Entry("a", (5,), placement=Placement.COLUMN), "parameter 'a': a column placement needs two"),
        (lambda: Entry("a", (5,), placement="rwo"), "did you mean 'row'"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda layout: layout.segments(-1), "no owner -1: the layout has 2"),
        (lambda layout: layout.segments(2), "no owner 2"),
        (lambda layout: layout.segments(0, 9), "no bucket 9"),
        (lambda layout: layout.locate(0, 15), "no element 15: the layout has 15"),
        (lambda layout: layout.locate(-1, 0), "no entry -1"),
        (lambda layout: list(layout.places(0, 9, 16)), "no elements 9 to 16: 'weight' has 15"),
        (lambda layout: layout.index("waight"), "no parameter 'waight'; did you mean 'weight'"),
        (lambda layout: layout.bucket_offset(0), r"'weight' has placement 'row'.*segments_of\(0\)"),
    ],
)
def test_a_question_without_an_answer_is_refused(ask, message):
    layout = ShardLayout.build([Entry("weight", (3, 5), placement=Placement.ROW)], 2)
    assert layout.index("weight") == 0
    with pytest.raises(ConfigError, match=message):
        ask(layout)
