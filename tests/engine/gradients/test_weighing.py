"""`sherd.weigh`: every token counts the same, on whatever rank and in whatever micro-batch it is."""

from __future__ import annotations

import itertools

import pytest
import torch

import sherd
from sherd import ConfigError, SherdError
from tests.helpers.training import (
    EVERYWHERE,
    STRATEGIES,
    K,
    batch,
    close,
    connected,
    distributed,
    double,
    loss_of,
    sgd,
    train,
    weights,
)

TOKENS = ((5, 1, 3), (2, 7, 0))  # of each rank's micro-batches; rank 1's last is nothing but padding


def token_weighted(strategy_and_where, c, by_hand):
    strategy, where = strategy_and_where
    options = {} if by_hand else {"accumulate": K}
    model, optimizer = distributed(c, strategy, double, accumulate_at=where, **options)
    for _ in range(2):
        for step, tokens in enumerate(TOKENS[c.rank]):
            sherd.weigh(model, tokens)
            loss = loss_of(model, batch(c.rank, step, tokens, torch.float64))
            assert loss.isnan() == (tokens == 0)
            loss.backward()
            if not by_hand:
                optimizer.step()
                optimizer.zero_grad()
        if by_hand:
            optimizer.step()
            model.zero_grad()
    return weights(model)


def weighed():
    plain = double()
    reference = sgd(plain)
    parts = [batch(r, step, n, torch.float64) for r in (0, 1) for step, n in enumerate(TOKENS[r])]
    everything = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    train(plain, reference, [everything] * 2)
    with connected() as c:
        for case, hand in itertools.product(EVERYWHERE, (False, True)):
            close(token_weighted(case, c, hand), weights(plain), (case, hand))


def test_weighed_backwards_give_the_mean_over_all_tokens(ranks):
    ranks(2).run(weighed)


def weighed_alone(strategy, reduction):
    with connected() as c:
        model, _ = distributed(c, strategy, loss_reduction=reduction)
        if c.rank == 0:
            sherd.weigh(model, 3)
        with pytest.raises(SherdError) as caught:
            loss_of(model, batch(c.rank)).backward()
        return str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_weighs_alone_is_found(ranks, strategy):
    # Sums and means are different calls; who finds out first may leave before the other one does.
    assert any("different calls" in text for text in ranks(2).run(weighed_alone, strategy, "mean"))
    assert all("1 of 2 ranks weighed" in text for text in ranks(2).run(weighed_alone, strategy, "sum"))


def wrong_weights():
    with connected() as c:
        for strategy in STRATEGIES:
            for first in (True, False):
                model, optimizer = distributed(c, strategy)
                for weighs in (first, not first):
                    if weighs:
                        sherd.weigh(model, 3)
                    if weighs == first:
                        loss_of(model, batch(c.rank)).backward()
                with pytest.raises(ConfigError, match="some backwards of one step were weighed and others not"):
                    loss_of(model, batch(c.rank)).backward()
            model, optimizer = distributed(c, strategy)
            for weight in (-1, float("nan"), float("inf")):
                with pytest.raises(ConfigError, match="a weight is a finite number"):
                    sherd.weigh(model, weight)
            sherd.weigh(model, 0)
            loss_of(model, batch(c.rank)).backward()
            with pytest.raises(ConfigError, match="every weight of this step was 0"):
                optimizer.step()


def test_weights_that_do_not_fit_together_are_refused(ranks):
    ranks(2).run(wrong_weights)
