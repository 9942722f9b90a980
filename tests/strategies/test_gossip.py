"""Gossip against plain models that are mixed by hand, over every transport."""

from __future__ import annotations

import pytest
import torch

import sherd
from sherd.layout.topology import topology_of
from tests.helpers.training import batch, connected, distributed, double, network, same, sgd, train, weights

pytestmark = pytest.mark.ranks
STEPS = 6
DIRECTED = [[0.5, 0.0, 0.25], [0.5, 0.6, 0.0], [0.0, 0.4, 0.75]]
"""Column stochastic: rank 2 ends up with more than its share."""
CASES = {
    "ring": {"topology": "ring"},
    "exponential": {"topology": "exponential"},
    "one-peer": {"topology": "one-peer-exponential"},
    "every": {"topology": "one-peer-exponential", "every": 2},
    "warmup": {"topology": "ring", "warmup": 3},
}


def run(transport, options, spoilt=(), steps=STEPS, make=double, **more):
    """The weights after every step, and the payload of each; at `spoilt` (rank, step), the gradient is NaN."""
    with connected(transport) as c:
        model, optimizer = distributed(c, sherd.Gossip(**options), make, **more)
        dtype = next(model.parameters()).dtype
        seen, payloads = [], []
        for step in range(steps):
            x, y = batch(c.rank, step, dtype=dtype)
            train(model, optimizer, [(x * float("nan") if (c.rank, step) in spoilt else x, y)])
            seen.append(weights(model))
            payloads.append(sum(each.payload for each in c.counters.last_step.values()))
        return seen, payloads


def reference(world, options, spoilt=(), steps=STEPS, make=double, train=train):
    """Plain models on the batches of their ranks. Numerators and masses are kept apart here."""
    graph = topology_of(options["topology"], world)
    every, warmup, seen = options.get("every", 1), options.get("warmup", 0), []
    models = [make() for _ in range(world)]
    optimizers = [sgd(model) for model in models]
    flats = [list(model.parameters()) for model in models]
    numerators = [[p.detach().clone() for p in flat] for flat in flats]
    masses = torch.ones(world, dtype=torch.float64)
    for step in range(steps):
        parts = [batch(rank, step, dtype=flats[0][0].dtype) for rank in range(world)]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            before = [p.detach().clone() for p in flats[rank]]
            if step < warmup:
                train(model, optimizer, [tuple(torch.cat(column) for column in zip(*parts, strict=True))])
            elif (rank, step) not in spoilt:
                train(model, optimizer, [parts[rank]])
            for numerator, p, old in zip(numerators[rank], flats[rank], before, strict=True):
                numerator += p.detach() - old
        if step >= warmup and (step - warmup) % every == every - 1:
            full = graph.at((step - warmup) // every).matrix()
            masses = full @ masses
            for place, stacked in enumerate(map(torch.stack, zip(*numerators, strict=True))):
                mixed = torch.tensordot(full.to(stacked.dtype), stacked, 1)
                for rank in range(world):
                    numerators[rank][place] = mixed[rank].clone()
                    with torch.no_grad():
                        flats[rank][place].copy_(mixed[rank] / masses[rank])
        seen.append([weights(model) for model in models])
    return seen


def follows(by_rank, expected, rtol=1e-11):
    for step, models in enumerate(expected):
        for rank, (seen, _) in enumerate(by_rank):
            for name, value in models[rank].items():
                torch.testing.assert_close(seen[step][name], value, rtol=rtol, atol=rtol, msg=f"{step} {rank} {name}")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_topology_is_plain_training_mixed_by_hand_with_the_same_bits_on_every_transport(ranks, world):
    for options in CASES.values():
        host, flat = (ranks(world).run(run, transport, options) for transport in ("host", "c10d"))
        follows(host, reference(world, options))
        for (ours, _), (theirs, _) in zip(host, flat, strict=True):
            for step in range(STEPS):
                same(ours[step], theirs[step], (options, step))


def test_push_sum_follows_numerators_and_masses(ranks):
    for options in ({"topology": DIRECTED, "push_sum": True}, {"topology": DIRECTED, "push_sum": True, "every": 2}):
        by_rank = ranks(3).run(run, "host", options)
        follows(by_rank, reference(3, options))
        for (ours, _), (theirs, _) in zip(by_rank, ranks(3).run(run, "c10d", options), strict=True):
            same(ours[-1], theirs[-1])


@pytest.mark.parametrize("world", [2, 3, 4])
def test_payload_is_that_of_the_degree(ranks, world):
    size = 1024 * 8  # with padding
    for name, options in CASES.items():
        if "warmup" in options:
            continue
        degree = {"ring": min(world - 1, 2), "exponential": (world - 1).bit_length()}.get(name, 1)
        expected = [degree * size if (step + 1) % options.get("every", 1) == 0 else 0 for step in range(STEPS)]
        for transport in ("host", "c10d"):
            for _, payloads in ranks(world).run(run, transport, options):
                assert payloads == expected, (name, transport)


def test_between_hosts_bits_are_the_same_and_only_neighbours_on_others_cost_anything(ranks, hosts):
    for name, crossing in (("ring", [1] * STEPS), ("one-peer", [None, 1] * (STEPS // 2))):
        across = hosts(2, 2).run(run, "cluster", CASES[name])
        for (ours, payloads), (theirs, _) in zip(across, ranks(4).run(run, "host", CASES[name]), strict=True):
            same(ours[-1], theirs[-1], name)
            for payload, messages in zip(payloads, crossing, strict=True):
                assert messages is None or payload == messages * 1024 * 8
        if name == "one-peer":  # rank i gives to i + 1: two of four cross
            assert sorted(payloads[0] for _, payloads in across) == [0, 0, 1024 * 8, 1024 * 8]


def still(options, rounds, dtype, transport="host"):
    """Rounds of nothing but mixing, from values that differ: what this rank has after each, and at the consensus."""
    with connected(transport) as c:
        model = network(dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = sherd.distribute(model, optimizer, strategy=sherd.Gossip(**options), comm=c)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(c.rank), dtype=dtype)
        seen = []
        for _ in range(rounds):
            seen.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
            train(model, optimizer, [batch(c.rank, dtype=dtype)])
        with sherd.consensus(model):
            agreed = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        seen.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
        return seen, agreed


def test_mixing_alone_preserves_the_mean_and_contracts_as_the_matrix_says(ranks):
    for name in ("ring", "exponential", "one-peer-exponential"):
        by_rank = ranks(4).run(still, {"topology": name}, 7, torch.float64)
        seen = torch.stack([torch.stack(seen) for seen, _ in by_rank], 1)  # round, rank, element
        mean = seen[0].mean(0)
        assert (seen.mean(1) - mean).abs().max() < 1e-13
        distances = [float((each - mean).norm()) for each in seen]
        if name == "one-peer-exponential":
            assert distances[1] > 1 and distances[2] < 1e-13  # 2^2 ranks have the mean after 2 rounds
        else:
            rate = topology_of(name, 4).contraction
            assert distances[7] / distances[6] == pytest.approx(rate, rel=1e-3) and rate == pytest.approx(1 / 3)
        for _, agreed in by_rank:
            assert (agreed - mean).abs().max() < 1e-13


def test_push_sum_reaches_the_true_mean_where_plain_mixing_would_not(ranks):
    options = {"topology": DIRECTED, "push_sum": True}
    for transport in ("host", "c10d"):
        by_rank = ranks(3).run(still, options, 60, torch.float64, transport)
        mean = torch.stack([seen[0] for seen, _ in by_rank]).mean(0)
        for seen, agreed in by_rank:
            assert (seen[-1] - mean).abs().max() < 1e-12
            assert (agreed - mean).abs().max() < 1e-12
    half_way = ranks(3).run(still, options, 1, torch.float64)
    values = torch.stack([seen[-1] for seen, _ in half_way])
    assert (values.mean(0) - mean).abs().max() > 0.01  # the mean of what models see is not the consensus
    for _, agreed in half_way:
        assert (agreed - mean).abs().max() < 1e-13
    within = ranks(3).run(still, {**options, "every": 4}, 6, torch.float64)
    for _, agreed in within:
        assert (agreed - mean).abs().max() < 1e-13


def test_half_precision_is_mixed_in_single(ranks):
    by_rank = ranks(3).run(still, {"topology": "ring"}, 1, torch.bfloat16)
    starts = torch.stack([seen[0] for seen, _ in by_rank])
    exact = starts.double().mean(0).bfloat16()
    rounded_often = starts[0] / 3 + starts[1] / 3 + starts[2] / 3
    assert (rounded_often != exact).double().mean() > 0.2
    for seen, _ in by_rank:
        assert (seen[1] != exact).double().mean() < 0.05
