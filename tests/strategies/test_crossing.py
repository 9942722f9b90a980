"""What crosses teams, and what is kept for it: bytes by the formulas, and nothing between exchanges."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sherd
from sherd.api.training import training_of
from sherd.comm import Counters
from tests.helpers.training import connected

pytestmark = pytest.mark.ranks
EVERY = 3
WIDTH, DEPTH, BUCKET_BYTES = 128, 4, 1 << 17  # no padding, and no bucket of 32 KB or less, which is sent in another way


def stack():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def step(model, optimizer, rank, times=1):
    for _ in range(times):
        model(torch.full((2, WIDTH), 0.1 * (rank + 1))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def distributed(c, strategy, **options):
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters())
    return sherd.distribute(model, optimizer, strategy=strategy, comm=c, bucket_bytes=BUCKET_BYTES, **options)


def sent(transport, cases):
    """By case: padded elements, payload of a period, payload and control across teams after each of its steps."""
    found = []
    with connected(transport) as c:
        for strategy in cases:
            model, optimizer = distributed(c, strategy)
            engine = training_of(model).engine
            step(model, optimizer, c.rank, EVERY)
            c.counters.reset()
            step(model, optimizer, c.rank, EVERY)
            payload = c.counters.total().payload
            crossing = Counters()
            if engine.teams.count > 1:
                for comm in (engine.teams.across, engine.teams.everyone):
                    comm.counters = crossing
            seen = []
            for _ in range(2 * EVERY):
                before = crossing.total()
                step(model, optimizer, c.rank)
                after = crossing.total()
                seen.append((after.payload - before.payload, after.control - before.control))
            found.append((engine.layout.padded_numel, payload, seen))
    return found


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_only_exchanges_cross_and_cost_a_step_of_ddp(ranks, transport):
    cases = [
        "ddp",
        sherd.LocalSGD(every=EVERY),
        sherd.DiLoCo(every=EVERY),
        sherd.DiLoCo(every=EVERY, outer_dtype="bf16"),
        sherd.LocalSGD(every=EVERY, over=2),
        sherd.DiLoCo(every=EVERY, over=2),
        sherd.DiLoCo(every=EVERY, over=2, fragments=3, delay=0),
    ]
    by_rank = ranks(4).run(sent, transport, cases)
    for rank in by_rank:
        (_, ddp, _), local, diloco, half, *teams = rank
        assert local[1] == diloco[1] == 2 * half[1] == ddp / EVERY, (ddp, local, diloco, half)
        for _, _, seen in (local, diloco, *teams[:2]):
            assert [bool(payload) for payload, _ in seen] == [False, False, True] * 2, seen
            assert [bool(control) for _, control in seen] == [False, False, True] * 2, seen
            assert all(control < 0.05 * payload for payload, control in seen if payload)
        for padded, _, seen in teams[:2]:  # each of 2 ranks has half of what crosses to the other team
            assert seen[2][0] == 2 * 4 * (padded // 2) // 2
        assert sum(payload for payload, _ in teams[2][2]) == 2 * teams[1][2][2][0]
    of_a_team = [
        sum(payload) for payload in zip(*([each for each, _ in rank[-1][2]] for rank in by_rank[:2]), strict=True)
    ]
    assert all(of_a_team), of_a_team  # a part at every step


def kept(cases):
    found = []
    with connected() as c:
        for strategy in cases:
            model, optimizer = distributed(c, strategy)
            step(model, optimizer, c.rank, EVERY)
            training = training_of(model)
            assert "outer state" in sherd.describe(model)
            found.append((training.engine.layout.padded_numel, training.memory()))
    return found


def test_outer_state_is_sharded_over_all_ranks(ranks):
    cases = [
        (sherd.DiLoCo(every=EVERY), 8 / 4),
        (sherd.DiLoCo(every=EVERY, over=2), 8 / 4),
        (sherd.DiLoCo(every=EVERY, over=2, inner="ddp"), 8 / 4),
        (sherd.DiLoCo(every=EVERY, outer_momentum=0.0), 4 / 4),
        (sherd.DiLoCo(every=EVERY, over=2, outer_dtype="bf16"), 4 / 4 + 4 / 2),
        (sherd.LocalSGD(every=EVERY, outer="slowmo"), 8 / 4),
    ]
    for rank, found in enumerate(ranks(4).run(kept, [strategy for strategy, _ in cases])):
        for (padded, kinds), (strategy, per_parameter) in zip(found, cases, strict=True):
            assert kinds["outer state"] == per_parameter * padded, (rank, strategy)
            if strategy.over == 2 and strategy.inner == "zero2":  # one copy per team, and state sharded in it
                assert kinds["parameters"] == (4 * padded if rank % 2 == 0 else 0)
                assert kinds["optimizer state"] <= 8 * padded / 2 * 1.01
