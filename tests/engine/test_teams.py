"""Ranks in teams: a team trains together, and nothing crosses teams but what the policy exchanges."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import sherd
from sherd.engine.policy import Drift, StepContext
from sherd.errors import SherdError
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
        self.drift.since += 1
        if (s.step + 1) % EVERY == 0:
            self.drift.since = 0
            for bucket in s.buckets:
                s.across.all_reduce(bucket.values.owned, bucket.values.owned, op="mean").wait()


@register("teams-of-two")
@dataclass(frozen=True, kw_only=True)
class TeamsOfTwo(Strategy):
    def team(self, comm) -> int:
        return TEAM

    def policy(self, comm, device):
        inner = ZeRO(stage=2).policy(comm, device)
        policy = TeamsPolicy(2, inner.home, inner.shard_over)
        policy.drift = Drift()
        return policy


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


def at_consensus():
    """Ranks of two teams that differ: what each sees inside, and afterwards."""
    with connected() as c:
        model = nn.Sequential(network(), nn.BatchNorm1d(5))
        model, optimizer = sherd.distribute(model, sgd(model), strategy="teams-of-two", comm=c)
        for step in range(2):
            train(model, optimizer, [batch(c.rank, step)])
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with sherd.consensus(model):
            inside = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            with pytest.raises(SherdError, match=r"inside sherd\.consensus"):
                optimizer.step()
        after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(SherdError, match="are lost"), sherd.consensus(model), torch.no_grad():
            model[0][0].weight.add_(1)
        described = sherd.describe(model)
        train(model, optimizer, [batch(c.rank, 2)])
        return before, inside, after, described, weights(model)


def test_inside_consensus_every_rank_has_the_mean_of_all_teams(ranks):
    by_rank = ranks(4).run(at_consensus)
    befores, insides, afters, described, ends = zip(*by_rank, strict=True)
    for name in befores[0]:
        if befores[0][name].is_floating_point():
            assert not torch.equal(befores[0][name], befores[2][name]), name
            mean = (befores[0][name].double() + befores[2][name].double()) / 2
            torch.testing.assert_close(insides[0][name].double(), mean, rtol=1e-6, atol=1e-7)
    for rank in range(4):
        same(insides[rank], insides[0], rank)
        same(afters[rank], befores[rank], rank)
        same(ends[rank], ends[0], rank)  # the third step is an exchange
        assert "2 groups of 2 ranks train together" in described[rank]
        assert "2 steps after the last exchange" in described[rank]


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
