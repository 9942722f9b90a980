"""Random training loops with a loss scale: the bits of those without one, in every gradient, norm and weight."""

from __future__ import annotations

import random

import pytest
import torch

import sherd
from tests.contracts.test_random_loops import STRATEGIES, OnRanks, drawn, told
from tests.helpers.training import connected

# A loop sees many scales.
SCALE = sherd.LossScale(initial=2.0**10, growth_interval=1, ceiling=2.0**60)


class Scaled(OnRanks):
    """The same loop with a scale, and backwards that overflow, after which the loop goes on as if they had not been."""

    def __init__(self, case, c, strategy, seed):
        super().__init__(case, c, strategy, loss_scale=SCALE)
        self.draw, self.world = random.Random(seed), c.world
        self.engine = self.model._sherd_training.engine
        self.scales = []

    def zero_grad(self, to_none):
        super().zero_grad(to_none)
        gradient = self.engine.gradients[0]
        if to_none and self.draw.random() < 0.5 and not any(p.grad is not None for p in self.model.parameters()):
            where, skipped, before = self.draw.randrange(self.world), gradient.skipped, self.engine.scale.value
            loss = self.loss(0, self.rank, 7)
            (loss * float("nan") if self.rank == where else loss).backward()
            self.optimizer.step()
            assert gradient.skipped == skipped + 1 and self.engine.scale.value == before / 2
            self.optimizer.zero_grad()

    def step(self):
        super().step()
        self.scales.append(self.engine.scale.value)


def loop(seed):
    """The scales that a loop saw, which are those of all strategies."""
    with connected() as c:
        case, program = drawn(seed, c.world)
        case = case._replace(mixed=False)  # a float16 rounds differently with a scale: that is what it is for
        first = None
        for strategy in STRATEGIES:
            with told(seed, strategy, case, program):
                expected = OnRanks(case, c, strategy).run(program)
                scaled = Scaled(case, c, strategy, seed)
                seen = scaled.run(program)
                torch.testing.assert_close(seen, expected, rtol=0, atol=0, equal_nan=True)
                first = first or scaled.scales
                assert scaled.scales == first
            scaled.engine.summed.scaling.leave(scaled.engine.summed)
        return first


def check(ranks, world, seed):
    first, *others = ranks(world).run(loop, seed)
    assert first and all(other == first for other in others)


@pytest.mark.parametrize(("world", "seed"), [(2, 0), (2, 1), (2, 2), (2, 3), (3, 4), (3, 5)])
def test_random_scaled_loops(ranks, world, seed):
    check(ranks, world, seed)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(2000, 2200))
@pytest.mark.parametrize("world", [2, 3, 4])
def test_many_random_scaled_loops(ranks, world, seed):
    check(ranks, world, seed)
