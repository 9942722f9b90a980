"""Gossip against plain models that are mixed by hand, over every transport."""

from __future__ import annotations

import pytest
import torch

import sherd
from sherd.layout.topology import topology_of
from tests.helpers.training import batch, connected, distributed, double, same, sgd, train, weights

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
