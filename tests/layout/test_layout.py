"""The layout: every element in one segment, every block in one place, slices equal or, of whole layers, one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sherd.comm.summation import SummationTree
from sherd.errors import ConfigError
from sherd.layout import BLOCK, ITEMSIZE, Entry, Placement, ShardLayout, padded
from sherd.layout.packing import Holders
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
            place = bucket.owner_of(owner)
            assert end <= (0 if place is None else bucket.owned_numel(place))


@quick
@given(layouts)
def test_slices_are_equal_and_whole_blocks(layout):
    for bucket in layout.buckets:
        assert bucket.slice_numel % BLOCK == 0
        spans = [bucket.span(owner) for owner in range(bucket.world)]
        assert sum(high - low for low, high in spans) == bucket.numel
        if bucket.placement is Placement.LAYER:
            assert bucket.numel == bucket.slice_numel == sum(padded(entry.numel) for entry in bucket.entries)
            assert spans[bucket.holder] == (0, bucket.numel)
        else:
            assert bucket.numel == bucket.world * bucket.slice_numel
            assert all(high - low == bucket.slice_numel for low, high in spans)
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
        assert sum(sizes) <= max(bucket_numel, max(sizes))
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
@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 50)), min_size=1, max_size=30), WORLDS, BUCKET_NUMELS)
def test_whole_layers_are_balanced(layers, world, bucket_numel):
    entries = [Entry(f"p{n}", (numel,), "float32", Placement.LAYER) for n, (numel, _) in enumerate(layers)]
    layout = ShardLayout.build(entries, world, bucket_numel=bucket_numel)
    assert layout == ShardLayout.build(entries, world, bucket_numel=bucket_numel)
    assert all(len(layout.segments_of(entry)) == 1 for entry in range(len(entries)))
    sizes = [padded(entry.numel) for entry in entries]
    assert layout.padded_numel == sum(sizes)
    # By elements alone, as no work is given: no owner has more than its share and one layer.
    assert max(layout.owner_bytes(owner).get("float32", 0) for owner in range(world)) <= 4 * (
        sum(sizes) / world + max(sizes)
    )
    # By both: the greater share of any owner is at most the sum of both averages and the largest layer's.
    work = [each for _, each in layers]
    chosen = Holders(world).choose(entries, work)
    for owner in range(world):
        mine = [n for n, each in enumerate(chosen) if each == owner]
        by_size, by_work = (sum(each[n] for n in mine) / sum(each) for each in (sizes, work))
        most = max(max(sizes) / sum(sizes), max(work) / sum(work))
        assert max(by_size, by_work) <= 2 / world + most


def transformer(layers, width):
    """The matrices of a GPT, without embeddings."""
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return [
        Entry(f"{layer}.{n}", shape, placement=Placement.LAYER)
        for layer in range(layers)
        for n, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("world", [2, 3, 4, 8, 16])
@pytest.mark.parametrize(("layers", "width"), [(12, 768), (24, 1024), (6, 100), (32, 130)])
def test_a_transformer_is_balanced_by_size_and_by_work(layers, width, world):
    entries = transformer(layers, width)
    work = [entry.numel + entry.numel * min(entry.shape) for entry in entries]
    holders = Holders(world).choose(entries, work)
    layout = ShardLayout.build(entries, world, bucket_numel=1 << 19, holders=holders)
    assert layout.padded_numel < 1.05 * layout.numel, "padding"
    held = [layout.owner_bytes(owner)["float32"] // 4 for owner in range(world)]
    done = [sum(w for w, each in zip(work, holders, strict=True) if each == owner) for owner in range(world)]
    # No better than to a layer: half of the largest over what an owner has on average.
    slack = 0.5 * max(work) / (sum(work) / world)
    assert max(held) <= (1.05 + slack) * sum(held) / world, held
    assert max(done) <= (1.05 + slack) * sum(done) / world, done


def test_work_counts_where_sizes_are_equal():
    """Two matrices of equal size, of which one takes ten times as long: they do not go to one owner."""
    entries = [Entry(f"p{n}", (64, 64), placement=Placement.LAYER) for n in range(4)]
    assert Holders(2).choose(entries, [10, 10, 1, 1]) == [0, 1, 0, 1]
    assert Holders(2).choose(entries, [10, 1, 10, 1]) == [0, 0, 1, 1]


def test_holders_are_among_the_ranks_of_an_entry_and_later_ones_fill_up():
    entries = [Entry(f"p{n}", (n + 1, 256), placement=Placement.LAYER) for n in range(5)]
    holders = Holders(4)
    assert holders.choose(entries, ranks=[None, (1, 3), (1, 3), None, None]) == [2, 3, 3, 1, 0]
    more = [Entry("flat", (9,)), Entry("late", (256,), placement=Placement.LAYER)]
    assert holders.choose(more) == [None, 2]
    layout = ShardLayout.build(entries, 4, ranks=[None, (1, 3), (1, 3), None, None])
    assert [segment.owner for entry in range(5) for segment in layout.segments_of(entry)] == [2, 3, 3, 1, 0]
    grown = layout.grown(more, holders=[None, 1])
    assert [segment.owner for segment in grown.segments_of(6)] == [1]
    assert ShardLayout.from_json(grown.to_json()) == grown
    with pytest.raises(ConfigError, match="'late' has placement 'layer' and holder None"):
        layout.grown(more)


def test_equal_layers_fill_every_owner_without_padding():
    entries = [Entry(f"p{n}", (64, 64), "float32", Placement.LAYER) for n in range(12)]
    layout = ShardLayout.build(entries, 4, bucket_numel=2 * 4096)
    assert [len(bucket.members) for bucket in layout.buckets] == [2, 2, 2, 2, 1, 1, 1, 1]
    assert {owner: len(layout.segments(owner)) for owner in range(4)} == dict.fromkeys(range(4), 3)
    assert layout.padded_numel == layout.numel


@quick
@given(layouts)
def test_bytes_of_an_owner_are_those_of_its_slices(layout):
    for owner in range(layout.world):
        expected: Counter[str] = Counter()
        for bucket in layout.buckets:
            if bucket.ranks is None or owner in bucket.ranks:
                place = owner if bucket.ranks is None else bucket.ranks.index(owner)
                whole = bucket.holder is not None and bucket.holder != place
                expected[bucket.dtype] += 0 if whole else bucket.slice_numel * ITEMSIZE[bucket.dtype]
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
