"""Who gets what: each sample once, in the order of one process, in the same number of iterations on every rank."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from sherd.data import batch_weight
from sherd.data.dealing import Seat, deal, deal_whole, groups, iterations, part

pytestmark = pytest.mark.pure

WORLDS = st.integers(1, 9)
BATCHES = st.integers(1, 7)


def seats(world, size=None):
    """The seats of all ranks, in teams of `size`."""
    size = size or world
    return [Seat(rank, world, range(rank - rank % size, rank - rank % size + size)) for rank in range(world)]


def close(found, expected):
    return abs(found - expected) <= 1e-12 * max(abs(expected), 1)


@given(st.integers(0, 100), WORLDS)
def test_parts_are_consecutive_and_as_even_as_they_can_be(count, world):
    parts = [part(count, world, rank) for rank in range(world)]
    assert parts[0][0] == 0 and parts[-1][1] == count
    assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))
    sizes = [stop - start for start, stop in parts]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@given(st.integers(0, 200), WORLDS, BATCHES, st.booleans())
def test_ranks_together_see_what_one_process_sees(count, world, batch, drop_last):
    order, size = list(range(1000, 1000 + count)), world * batch
    dealt = [[deal(group, seat) for group in groups([order], size, drop_last)] for seat in seats(world)]
    assert {len(hands) for hands in dealt} == {iterations(count, size, drop_last)}
    expected = [order[start : start + size] for start in range(0, count, size)]
    if drop_last and count % size:
        expected.pop()
    for hands, group in zip(zip(*dealt, strict=True), expected, strict=True):
        counted = [index for indices, counts in hands if counts for index in indices]
        assert counted == group  # each once, in order; what is repeated counts nothing
        assert all(len(indices) == 1 and indices[0] == group[-1] for indices, counts in hands if not counts)
        assert close(sum(counts for _, counts in hands), world)
        if len(group) == size:
            assert [counts for _, counts in hands] == [1.0] * world


@given(st.integers(1, 100), WORLDS)
def test_shares_make_means_of_parts_the_mean_of_all(count, world):
    values = [float((7 * index) % 11) for index in range(count)]
    (group,) = groups([values], count, drop_last=False)
    hands = [deal(group, seat) for seat in seats(world)]
    mean = sum(counts * sum(mine) / len(mine) for mine, counts in hands) / world
    assert close(mean, sum(values) / count)


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 4))
def test_in_teams_the_mean_of_a_teams_parts_is_that_of_its_samples(count, size, teams):
    values = [float((7 * index) % 11) for index in range(count)]
    (group,) = groups([values], count, drop_last=False)
    hands = [deal(group, seat) for seat in seats(size * teams, size)]
    for first in range(0, size * teams, size):
        its = [(mine, counts) for mine, counts in hands[first : first + size] if counts]
        if its:
            samples = [value for mine, _ in its for value in mine]
            mean = sum(counts * sum(mine) / len(mine) for mine, counts in its) / size
            assert close(mean, sum(samples) / len(samples))


@given(st.lists(st.integers(0, 12), max_size=8), BATCHES, st.booleans())
def test_it_does_not_matter_in_which_chunks_an_order_comes(lengths, size, drop_last):
    order = list(range(sum(lengths)))
    ends = list(itertools.accumulate(lengths))
    chunks = [order[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def cut(chunks):
        return [list(order[start:stop]) for order, start, stop in groups(chunks, size, drop_last)]

    assert cut(chunks) == cut([order]) == cut([range(len(order))])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 4))
def test_whole_batches_count_by_their_rows(rows, missing):
    world, batches = len(rows) + missing, [f"batch {n}" for n in range(len(rows))]
    hands = [deal_whole(batches, rows, seat) for seat in seats(world)]
    assert [batch for batch, _ in hands] == [*batches, *[batches[-1]] * missing]
    assert all(counts == 0 for _, counts in hands[len(rows) :])
    for (_, counts), mine in zip(hands, rows, strict=False):
        assert close(counts, mine * world / sum(rows) if sum(rows) else 0.0)
    assert close(sum(counts for _, counts in hands), world if sum(rows) else 0)


def test_equal_shares_are_exactly_one():
    for count, world in itertools.product((1, 3, 7, 49, 10**6 + 3), (1, 3, 7, 1021)):
        assert seats(world)[-1].weight([count] * world) == 1.0


def test_the_share_is_that_of_the_loader_which_yielded_last():
    outer, inner = batch_weight.Pass(), batch_weight.Pass()
    assert batch_weight.current() == 1.0 and batch_weight.samples() is None
    outer.yields(0.5, samples=3)
    inner.yields(0.25)
    assert batch_weight.current() == 0.25
    outer.yields(0.75, samples=2)
    assert batch_weight.current() == 0.75 and batch_weight.samples() == 2
    inner.yields(0.0)
    assert batch_weight.current() == 0.0 and batch_weight.samples() == 0
    inner.ends()
    assert batch_weight.current() == 0.75
    del outer
    assert batch_weight.current() == 1.0 and batch_weight.samples() is None


def test_passes_inside_each_other_and_beside_each_other():
    train, evaluated = DataLoader([0]), DataLoader([0])
    outer, beside = batch_weight.Pass(train), batch_weight.Pass(evaluated)
    outer.yields(0.0, samples=2)
    beside.yields(1.0, samples=2)
    assert sorted(batch_weight.batches()) == [(2, 0), (2, 2)] == sorted(batch_weight.matching(2))
    assert batch_weight.batches(train) == [(2, 0)] and batch_weight.matching(2, loader=evaluated) == {(2, 2)}
    beside.ends()
    assert batch_weight.batches() == [(2, 0)]
    inside = batch_weight.Pass(evaluated)
    inside.yields(1.0, samples=2)
    assert batch_weight.batches() == [(2, 2)] and batch_weight.matching(2) == {(2, 2)}
    inside.yields(1.0, samples=1)
    assert batch_weight.matching(2) == {(2, 0)}  # the batch around it
    assert batch_weight.matching(3) == {(3, 3)}  # its own epoch
    outer.yields(1.0, samples=2)
    assert sorted(batch_weight.batches()) == [(1, 1), (2, 2)]  # it was not left, so they take turns
    del inside
    assert (
        batch_weight.batches() == [(2, 2)]
        and batch_weight.total(evaluated) == (3, 3)
        and batch_weight.total(train) == (4, 2)
    )
    del outer
    assert batch_weight.matching(4) == {(4, 2)} and batch_weight.matching(5) == set()


@pytest.mark.parametrize("count", [0, 1, 5])
def test_drop_last_counts_full_groups_only(count):
    assert iterations(count, 2, True) == count // 2 and iterations(count, 2, False) == (count + 1) // 2
