"""Local SGD: parameters are averaged every so many steps, and nothing crosses teams in between."""

from __future__ import annotations

import pytest
import torch

import sherd
from tests.helpers.averaging import STEPS, Worlds, by_case, close_to, trained

pytestmark = pytest.mark.ranks
EVERY = 3
STATE = "parameters and optimizer state"


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_averaging_in_every_step_is_ddp(ranks, transport):
    every_step = sherd.LocalSGD(every=1, average=STATE)
    pairs = sherd.LocalSGD(every=1, average=STATE, over=2, inner="zero2")
    copies = sherd.LocalSGD(every=1, average=STATE, over=2, inner="ddp")
    cases = [("ddp", {}), (every_step, {}), (pairs, {}), (copies, {})]
    ddp, *others = by_case(ranks(4).run(trained, cases, transport))
    for found in others:
        close_to(found, [[by_step] * 4 for by_step in ddp[0]])


def averaged(world, every=EVERY, warmup=0, size=1, spoilt=()):
    worlds = Worlds(world // size, size)

    def exchange(step):
        if step >= warmup and (step + 1 - warmup) % every == 0:
            worlds.average()

    return worlds.run(exchange, warmup, spoilt)


def test_what_it_computes(ranks):
    spoilt = ((1, 3), (2, 1), (5, 0), (6, 0))
    cases = [
        (sherd.LocalSGD(every=EVERY), {}),
        (sherd.LocalSGD(every=EVERY, warmup=2), {}),
        (sherd.LocalSGD(every=EVERY), {"spoilt": spoilt}),
        (sherd.LocalSGD(every=EVERY, warmup=2), {"spoilt": spoilt}),
        (sherd.LocalSGD(every=EVERY, over=2, warmup=2), {"spoilt": spoilt}),
        (sherd.LocalSGD(every=EVERY, over=2, inner="ddp", warmup=2), {"spoilt": spoilt}),
        (sherd.LocalSGD(every=EVERY, over=2, inner="zero3"), {}),
    ]
    expected = [
        averaged(4),
        averaged(4, warmup=2),
        averaged(4, spoilt=spoilt),
        averaged(4, warmup=2, spoilt=spoilt),
        averaged(4, warmup=2, size=2, spoilt=spoilt),
        averaged(4, warmup=2, size=2, spoilt=spoilt),
        averaged(4, size=2),
    ]
    for found, reference, (strategy, _) in zip(by_case(ranks(4).run(trained, cases)), expected, cases, strict=True):
        size = 1 if strategy.over == "ranks" else 2
        close_to(found, reference, size)
        for step in range(STEPS):
            apart = [not torch.equal(found[0][step]["0.weight"], other[step]["0.weight"]) for other in found]
            meets = step < strategy.warmup or (step + 1 - strategy.warmup) % EVERY == 0
            assert any(apart) is not meets, step
            assert not any(apart[:size]), step
