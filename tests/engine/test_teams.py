"""Ranks in teams: a team trains together, and nothing crosses teams but what the policy exchanges."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import sherd
from sherd.engine.policy import StepContext
from sherd.strategies import Strategy, ZeRO, register
from sherd.strategies.zero import Sharded
from tests.helpers.training import batch, connected, distributed, network, same, sgd, train, weights

pytestmark = pytest.mark.ranks
TEAM, EVERY, STEPS = 2, 3, 7


class TeamsPolicy(Sharded):
    """ZeRO inside a team; every third step the owners of a slice take its mean over the teams."""

    def after_update(self, s: StepContext) -> None:
        self._meet(s)
        super().after_update(s)

    def skipped(self, s: StepContext) -> None:
        self.before_update(s)
        self._meet(s)
        super().after_update(s)

    def _meet(self, s: StepContext) -> None:
        if (s.step + 1) % EVERY == 0:
            for bucket in s.buckets:
                s.across.all_reduce(bucket.values.owned, bucket.values.owned, op="mean").wait()


@register("teams-of-two")
@dataclass(frozen=True, kw_only=True)
class TeamsOfTwo(Strategy):
    def team(self, comm) -> int:
        return TEAM

    def policy(self, comm, device):
        inner = ZeRO(stage=2).policy(comm, device)
        return TeamsPolicy(2, inner.home, inner.shard_over)


def run(spoilt=()):
    """The weights after every step; at the steps in `spoilt`, rank 3's gradient is NaN."""
    with connected() as c:
        model, optimizer = distributed(c, "teams-of-two")
        seen = []
        for step in range(STEPS):
            x, y = batch(c.rank, step)
            train(model, optimizer, [(x * float("nan") if c.rank == 3 and step in spoilt else x, y)])
            seen.append(weights(model))
        return seen


def reference(spoilt=()):
    """Two plain models on the batches of their teams, averaged every third step."""
    models = [network() for _ in range(2)]
    optimizers = [sgd(model) for model in models]
    seen = []
    for step in range(STEPS):
        for team, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if team == 1 and step in spoilt:
                continue
            parts = [batch(rank, step) for rank in (2 * team, 2 * team + 1)]
            train(model, optimizer, [tuple(torch.cat(column) for column in zip(*parts, strict=True))])
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                for one, other in zip(*(model.parameters() for model in models), strict=True):
                    mean = (one + other) / 2
                    one.copy_(mean)
                    other.copy_(mean)
        seen.append([weights(model) for model in models])
    return seen


def close_to(by_rank, expected):
    for step, teams in enumerate(expected):
        for rank, seen in enumerate(by_rank):
            for name, value in teams[rank // TEAM].items():
                torch.testing.assert_close(seen[step][name], value, rtol=2e-5, atol=1e-6, msg=f"{step} {rank} {name}")


def test_teams_train_apart_and_meet_where_the_policy_says(ranks):
    by_rank = ranks(4).run(run)
    close_to(by_rank, reference())
    for step in range(STEPS):
        same(by_rank[1][step], by_rank[0][step], step)
        same(by_rank[3][step], by_rank[2][step], step)
        meets = (step + 1) % EVERY == 0
        assert all(torch.equal(by_rank[0][step][n], by_rank[2][step][n]) for n in by_rank[0][step]) is meets, step


def test_a_team_that_skips_a_step_meets_the_other_all_the_same(ranks):
    by_rank = ranks(4).run(run, (1, 2))
    close_to(by_rank, reference(spoilt=(1, 2)))


def starting():
    """Every rank starts with values of its own, and loads others later."""
    with connected() as c:
        model = network(seed=c.rank)
        model, _ = sherd.distribute(model, sgd(model), strategy="teams-of-two", comm=c)
        start = weights(model)
        model.load_state_dict(network(seed=10 + c.rank).state_dict())
        return start, weights(model)


def test_all_teams_start_from_and_load_rank_0s_values(ranks):
    for start, loaded in ranks(4).run(starting):
        same(start, dict(network(seed=0).named_parameters()))
        same(loaded, dict(network(seed=10).named_parameters()))


def edited():
    """Rank 3 edits a parameter by itself."""
    with connected() as c:
        model, optimizer = distributed(c, "teams-of-two")
        train(model, optimizer, [batch(c.rank)])
        if c.rank == 3:
            model[0].bias.data.add_(1)
        if c.rank >= 2:
            train(model, optimizer, [batch(c.rank, 1)])


def test_messages_name_ranks_by_their_number_in_the_job(ranks):
    with pytest.raises(sherd.RankFailed, match="edited only on rank 3 of ranks 2, 3"):
        ranks(4).run(edited)
