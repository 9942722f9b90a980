"""Mixing matrices: what they preserve, how fast they contract, and which are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sherd.errors import ConfigError
from sherd.layout.topology import TOPOLOGIES, Mixing, check_matrix, read_matrix

pytestmark = pytest.mark.pure

quick = settings(max_examples=50, deadline=None)
named = st.sampled_from(sorted(TOPOLOGIES))


def third(n):
    """The ring written out."""
    return [[1 / 3 if (i - j) % n in (0, 1, n - 1) else 0.0 for j in range(n)] for i in range(n)]


@quick
@given(named, st.integers(1, 40), st.integers(0, 9))
def test_every_named_round_preserves_mass_and_mean(name, world, number):
    full = TOPOLOGIES[name](world).at(number).matrix()
    assert full.shape == (world, world) and bool((full >= 0).all()) and bool((full.diagonal() > 0).all())
    ones = torch.ones(world, dtype=torch.float64)
    assert torch.allclose(full.sum(0), ones, atol=1e-12) and torch.allclose(full.sum(1), ones, atol=1e-12)
    check_matrix(read_matrix(TOPOLOGIES["ring"](world).at(0).matrix()), push_sum=False)


@quick
@given(named, st.integers(1, 40), st.integers(0, 9))
def test_sources_and_targets_are_two_views_of_the_same_edges(name, world, number):
    mixing = TOPOLOGIES[name](world).at(number)
    taken = {(source, rank) for rank in range(world) for source in mixing.sources(rank)}
    assert taken == {(rank, target) for rank in range(world) for target in mixing.targets(rank)}
    assert all(list(row) == sorted(row) for row in mixing.rows)
    assert all(source != rank for source, rank in taken)


@pytest.mark.parametrize(("world", "row"), [(1, {0: 1.0}), (2, {0: 0.5, 1: 0.5}), (5, dict.fromkeys((0, 1, 4), 1 / 3))])
def test_the_ring(world, row):
    assert TOPOLOGIES["ring"](world).rounds[0].rows[0] == row


def test_the_uniform_ring_of_eight_contracts_by_0_8047_per_round():
    ring = TOPOLOGIES["ring"](8)
    assert ring.contraction == pytest.approx((1 + 2 * math.cos(2 * math.pi / 8)) / 3, abs=1e-12)
    assert ring.contraction == pytest.approx(0.8047, abs=5e-5)
    x, full = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64), ring.at(0).matrix()
    distances = []
    for _ in range(80):
        x = full @ x
        distances.append(float((x - x.mean()).norm()))
    assert distances[-1] / distances[-2] == pytest.approx(0.8047, abs=5e-5)


def test_the_static_exponential_graph_is_that_of_the_paper():
    """Ying et al.: weights 1 / (ceil(log2 n) + 1), and a spectral gap of 2 / (1 + ceil(log2 n)) for even n."""
    graph = TOPOLOGIES["exponential"](6)
    assert graph.rounds[0].targets(0) == [1, 2, 4] and graph.rounds[0].rows[0][0] == 1 / 4
    for world in (4, 6, 16):
        assert 1 - TOPOLOGIES["exponential"](world).contraction == pytest.approx(2 / (1 + math.ceil(math.log2(world))))


@pytest.mark.parametrize("k", range(7))
def test_one_peer_exponential_reaches_the_mean_of_two_to_the_k_ranks_after_k_rounds(k):
    graph, world = TOPOLOGIES["one-peer-exponential"](2**k), 2**k
    x = torch.randn(world, 3, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    mean = x.mean(0).expand(world, 3)
    for number in range(k):
        assert len(graph.at(number).sources(0)) == len(graph.at(number).targets(0)) == 1
        assert not torch.allclose(x, mean, atol=1e-6)
        x = graph.at(number).matrix() @ x
    assert torch.allclose(x, mean, atol=1e-14)
    assert graph.contraction == 0.0
    assert 0.3 < TOPOLOGIES["one-peer-exponential"](6).contraction < 0.9  # only powers of two are exact


@st.composite
def directed(draw):
    """A column-stochastic matrix of a strongly connected graph: a cycle and random edges, random weights."""
    n = draw(st.integers(2, 9))
    edges = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=2 * n))
    full = np.eye(n)
    for i, j in [*edges, *((i, (i + 1) % n) for i in range(n))]:
        full[j, i] = draw(st.floats(0.2, 1.0))
    return full / full.sum(0)


@quick
@given(directed(), st.integers(0, 99))
def test_push_sum_converges_to_the_true_mean_on_a_random_directed_graph(full, seed):
    rows = read_matrix(full)
    check_matrix(rows, push_sum=True)
    mixing = Mixing.of(rows)
    start = np.random.default_rng(seed).normal(size=len(rows))
    x, mass = tuple(start), (1.0,) * len(rows)
    for _ in range(2000):
        x, mass = mixing.of_mass(x), mixing.of_mass(mass)
    assert sum(mass) == pytest.approx(len(rows)) and min(mass) > 0
    assert [a / w for a, w in zip(x, mass, strict=True)] == pytest.approx([start.mean()] * len(rows), abs=1e-6)


@quick
@given(directed(), st.sampled_from((24, 53)))
def test_rounded_weights_sum_to_exactly_one_down_every_column(full, bits):
    mixing = Mixing.of(read_matrix(full))
    rounded = mixing.rounded(bits)
    assert [row.keys() for row in rounded.rows] == [row.keys() for row in mixing.rows]
    assert bool((rounded.matrix().sum(0) == 1.0).all())
    assert torch.allclose(rounded.matrix(), mixing.matrix(), atol=2.0 ** (4 - bits))
    if bits == 24:
        assert torch.equal(rounded.matrix().float().double(), rounded.matrix())  # each is a float


def growth(mixing, rounds=300):
    """How much all values together grow by rounding, in single precision, while they change a little every round."""
    generator = torch.Generator().manual_seed(0)
    values = [3 + torch.randn(5000, generator=generator) for _ in mixing.rows]
    expected = sum(value.double().sum() for value in values)
    for _ in range(rounds):
        for value in values:
            expected -= value.double().sum()
            value += 1e-3 * torch.randn(5000, generator=generator)
            expected += value.double().sum()
        parts = [[(values[rank], weight) for rank, weight in row.items()] for row in mixing.rows]
        values = [sum(value * weight for value, weight in row) for row in parts]
    return abs(float(sum(value.double().sum() for value in values) / expected - 1))


def test_three_thirds_of_single_precision_are_more_than_one_and_rounded_ones_are_not():
    ring = TOPOLOGIES["ring"](3).at(0)
    assert growth(ring) > 5e-6
    assert growth(ring.rounded(24)) < growth(ring) / 4  # what is left is the rounding of products
    assert bool((TOPOLOGIES["ring"](8).at(0).rounded(24).matrix().sum(1) == 1.0).all())


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_matrix_may_be_nested_lists_an_array_or_a_tensor(kind):
    rows = read_matrix(kind(third(4)))
    assert rows == pytest.approx(np.array(third(4)))
    check_matrix(rows, push_sum=False)


LEAKY = [[0.5, 0.4], [0.4, 0.5]]
ROWS_ONLY = [[0.5, 0.5], [0.25, 0.75]]
COLUMNS_ONLY = [[0.5, 0.25], [0.5, 0.75]]
SWAP = [[0.0, 1.0], [1.0, 0.0]]
APART = [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]]
ONE_WAY = [[0.5, 0.0], [0.5, 1.0]]


@pytest.mark.parametrize(
    ("matrix", "push_sum", "message"),
    [
        (LEAKY, False, "loses mass: column 0 sums to 0.9.*each column must sum to 1$"),
        ([[1.5, 0.0], [0.0, 1.0]], False, "gains mass: column 0 sums to 1.5"),
        (ROWS_ONLY, True, "loses mass: column 0 sums to 0.75.*transpose it"),
        (COLUMNS_ONLY, False, r"column stochastic.*row 0 sums to 0.75.*write push_sum=True"),
        (SWAP, False, "positive diagonal, found 0 in row 0, column 0"),
        (APART, False, r"not connected: nothing gets from rank 0 to rank 2.*ranks \[2, 3\]"),
        (ONE_WAY, True, "not connected: nothing gets to rank 0 from rank 1"),
        ([[1.5, -0.5], [-0.5, 1.5]], False, "0 or more, found -0.5 in row 0, column 1"),
        ([[math.nan, 0.5], [0.5, 0.5]], False, "0 or more, found nan"),
        ([[math.inf, 0.5], [0.5, 0.5]], False, "0 or more, found inf"),
        ([[0.5, 0.5]], False, r"one row and one column per rank, found 1 rows of \[2\] weights"),
        ([], False, "one row and one column per rank"),
        (3.0, False, "one row of numbers per rank, found 3.0"),
        ([["a"]], False, "one row of numbers per rank"),
    ],
)
def test_a_matrix_that_cannot_be_right_gets_one_clear_error(matrix, push_sum, message):
    with pytest.raises(ConfigError, match=message):
        check_matrix(read_matrix(matrix), push_sum)


def test_what_push_sum_allows():
    check_matrix(read_matrix(COLUMNS_ONLY), push_sum=True)
    check_matrix(read_matrix(third(5)), push_sum=True)
    almost = np.array(third(5), dtype=np.float32)
    check_matrix(read_matrix(almost), push_sum=False)
