"""A strategy that nobody in the package knows: the policy is enough, and public."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from sherd.engine.policy import ExchangePolicy, StepContext
from sherd.strategies import Strategy, register
from tests.helpers.training import batch, connected, distributed, train, weights

pytestmark = pytest.mark.ranks
EVERY, STEPS = 3, 7


class AveragingPolicy(ExchangePolicy):
    def sums(self, step: int) -> bool:
        return False

    def exchanges(self, step: int) -> bool:
        return (step + 1) % EVERY == 0

    def after_update(self, s: StepContext) -> None:
        super().after_update(s)
        if self.exchanges(s.step):
            for bucket in s.buckets:
                s.comm.all_reduce(bucket.values.whole, bucket.values.whole, op="mean").wait()


@register("average-every-3")
@dataclass(frozen=True, kw_only=True)
class Averaging(Strategy):
    def policy(self, comm, device) -> ExchangePolicy:
        return AveragingPolicy()


def averaged():
    with connected() as c:
        model, optimizer = distributed(c, "average-every-3")
        seen = []
        for step in range(STEPS):
            calls = c.counters.total().calls
            train(model, optimizer, [batch(c.rank, step)])
            seen.append((weights(model), c.counters.total().calls - calls))
        return seen


def test_parameters_are_averaged_every_third_step_and_nothing_is_sent_between(ranks):
    by_rank = ranks(2).run(averaged)
    for step, ((ours, calls), (theirs, _)) in enumerate(zip(*by_rank, strict=True)):
        meets = (step + 1) % EVERY == 0
        assert bool(calls) is meets, step
        assert all(torch.equal(ours[name], theirs[name]) for name in ours) is meets, step
