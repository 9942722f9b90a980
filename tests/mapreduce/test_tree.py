"""The order of merging depends on the chunks alone, never on who computed them or when."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sherd.mapreduce.tree import MOST_CHUNKS, Forest, chunks_in, default_chunk, items_of

pytestmark = pytest.mark.pure


def bracketed(a, b):
    return f"({a} {b})"


def expected(chunks):
    """Written another way: halves of the smallest power of two that covers all, from the top down."""

    def half(start, size):
        inside = [chunk for chunk in chunks if start <= chunk < start + size]
        if len(inside) < 2:
            return str(inside[0]) if inside else ""
        left, right = half(start, size // 2), half(start + size // 2, size // 2)
        return bracketed(left, right) if left and right else left or right

    return half(0, 1 << max(chunks).bit_length())


@given(st.sets(st.integers(0, 70), min_size=1), st.integers(1, 5), st.randoms())
def test_any_order_and_any_ranks_give_one_tree(chunks, world, order):
    by_rank = [Forest(bracketed) for _ in range(world)]
    for chunk in order.sample(sorted(chunks), len(chunks)):
        order.choice(by_rank).add((0, chunk), str(chunk))
    nodes = [node for forest in by_rank for node in forest.nodes.items()]
    order.shuffle(nodes)
    owner = Forest(bracketed)
    for node, result in nodes:
        owner.add(node, result)
    assert owner.total() == expected(chunks)


def test_neighbours_are_merged_at_once():
    """A rank alone holds few results at a time."""
    forest, most = Forest(bracketed), 0
    for chunk in range(256):
        forest.add((0, chunk), str(chunk))
        most = max(most, len(forest.nodes))
    assert most == 8 and len(forest.nodes) == 1


def test_sums_in_another_order_would_differ():
    """The check of bits in other tests can fail."""
    values = [random.Random(seed).gauss(0, 1) for seed in range(1000)]
    forest = Forest(lambda a, b: a + b)
    for chunk, value in enumerate(values):
        forest.add((0, chunk), value)
    assert forest.total() != sum(values) and abs(forest.total() - sum(values)) < 1e-9


def test_nothing_has_no_result():
    assert Forest(bracketed).total() is None


@given(st.integers(1, 5000), st.integers(1, 300))
def test_chunks_cover_every_item_once(items, chunk):
    parts = [items_of(number, chunk, items) for number in range(chunks_in(items, chunk))]
    assert [item for part in parts for item in part] == list(range(items))


@given(st.integers(0, 1 << 40))
def test_there_are_at_most_so_many_chunks_by_default(items):
    assert 0 <= chunks_in(items, default_chunk(items)) <= MOST_CHUNKS
    assert default_chunk(None) == 1
