"""NaN and infinite gradients are never applied unnoticed."""

from __future__ import annotations

import pytest

from sherd import SherdError
from tests.helpers.log_lines import log_lines
from tests.helpers.training import (
    STRATEGIES,
    adamw,
    batch,
    connected,
    differ,
    distributed,
    loss_of,
    same,
    train,
    weights,
)


def poisoned(rank, step, bad_rank, value):
    x, y = batch(rank, step)
    return (x, y * value) if rank == bad_rank else (x, y)


def skipped(set_to_none):
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, optimizer=adamw)
            expected, plain = distributed(c, strategy, optimizer=adamw)
            for step in (0, 2, 4):
                train(expected, plain, [batch(c.rank, step)])
            with log_lines() as lines:
                for step in range(5):
                    value = {1: float("nan"), 3: float("inf")}.get(step, 1.0)
                    before = weights(model)
                    loss_of(model, poisoned(c.rank, step, 1, value)).backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none)
                    assert differ(weights(model), before) == (value == 1.0), (strategy, step)
            same(weights(model), weights(expected), strategy)
            said = [line for line in lines if "not finite" in line]
            assert [f"({n} skipped so far)" in line for n, line in enumerate(said, 1)] == [True] * (2 * (c.rank == 0))
            assert all(s["step"] == 3 for s in optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_is_skipped_on_every_rank_if_one_rank_has_nan(ranks, set_to_none):
    ranks(2).run(skipped, set_to_none)


def in_a_window():
    with connected() as c:
        for strategy in STRATEGIES:
            for where in ("rank", "owner"):
                model, optimizer = distributed(c, strategy, accumulate=3, accumulate_at=where)
                before = weights(model)
                for step in range(6):
                    loss_of(model, poisoned(c.rank, step, 0, float("nan") if step == 0 else 1.0)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    assert differ(weights(model), before) == (step == 5), (strategy, where, step)


def test_nan_in_the_first_micro_batch_costs_the_window(ranks):
    ranks(2).run(in_a_window)


def raised_and_allowed():
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, nonfinite="raise")
            before = weights(model)
            loss_of(model, poisoned(c.rank, 0, 1, float("nan"))).backward()
            with pytest.raises(SherdError, match=r'rank \d: step 0: .*not finite.*nonfinite="skip"'):
                optimizer.step()
            same(weights(model), before, strategy)
            optimizer.zero_grad()
            train(model, optimizer, [batch(c.rank)])
            assert differ(weights(model), before)
            model, optimizer = distributed(c, strategy, nonfinite="allow")
            loss_of(model, poisoned(c.rank, 0, 1, float("nan"))).backward()
            optimizer.step()
            assert all(p.isnan().any() for p in model.parameters()), strategy


def test_raise_and_allow(ranks):
    ranks(2).run(raised_and_allowed)


def made_and_mended_by_hand():
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy)
            before = weights(model)
            loss_of(model, batch(c.rank)).backward()
            model[0].bias.grad[3] = float("nan")
            optimizer.step()
            optimizer.zero_grad()
            same(weights(model), before, strategy)
            loss_of(model, poisoned(c.rank, 0, 1, float("nan"))).backward()
            for parameter in model.parameters():
                parameter.grad.nan_to_num_(0.5)
            optimizer.step()
            assert differ(weights(model), before), strategy
            assert all(p.isfinite().all() for p in model.parameters())


def test_nan_that_the_user_puts_in_or_takes_out(ranks):
    ranks(2).run(made_and_mended_by_hand)
