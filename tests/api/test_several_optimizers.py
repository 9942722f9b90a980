"""Several optimizers for one model: what is refused, what differs between ranks, and what a program does to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import sherd
from sherd.api.training import training_of
from sherd.errors import ConfigError, Diverged, SherdError
from tests.engine.optimizer.owners import assert_same
from tests.helpers.log_lines import log_lines
from tests.helpers.training import (
    SHARDED,
    STRATEGIES,
    WORLD,
    K,
    all_same,
    batch,
    close,
    connected,
    differ,
    double,
    loss_of,
    network,
    same,
    weights,
    whole_batch,
)


def split(model):
    """One of the last layer, one of the first."""
    return torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(
        model[0].parameters(), lr=0.01
    )


def both(strategy, make=double, **options):
    model = make()
    return sherd.distribute(model, *split(model), strategy=strategy, **options)


def step(model, optimizers, data):
    loss_of(model, data).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def mine(c, step):
    return batch(c.rank, step, dtype=torch.float64)


# ---------------------------------------------------------------- refused


@pytest.mark.fake
def test_a_parameter_belongs_to_one_optimizer():
    model = network()
    sgd, adamw = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model[0].parameters())
    with pytest.raises(
        ConfigError, match=r"'0\.weight' is in two optimizers, optimizer 0 \(SGD\) and optimizer 1 \(Ad"
    ):
        sherd.distribute(model, sgd, adamw)
    model, sgd, adamw = both("zero2", network)
    with pytest.raises(
        ConfigError, match=r"'2\.weight' is in two optimizers, optimizer 0 \(SGD\) and optimizer 1 \(Ad"
    ):
        adamw.add_param_group({"params": model[2].weight})
    with pytest.raises(ConfigError, match="the new parameter group has a parameter of shape"):
        adamw.add_param_group({"params": network().parameters()})
    sgd.param_groups[0]["params"].append(adamw.param_groups[0]["params"].pop())
    with pytest.raises(ConfigError, match=r"group 0 of SGD has parameter '0\.bias', which another optimizer had"):
        step(model, (sgd, adamw), batch(0))


@pytest.mark.fake
def test_another_models_optimizer_is_named():
    model = network()
    with pytest.raises(ConfigError, match=r"group 0 of optimizer 1 \(SGD\) has a parameter of shape"):
        sherd.distribute(model, split(model)[0], torch.optim.SGD(network().parameters()))


def refused_on_ranks():
    with connected() as c:
        for strategy in SHARDED:
            model = network()
            searching = torch.optim.LBFGS([model[0].weight, model[2].weight])
            adamw = torch.optim.AdamW([model[0].bias, model[2].bias])
            with pytest.raises(ConfigError, match=r"optimizer 1 \(LBFGS\) cannot be sharded: .*strategy=.ddp."):
                sherd.distribute(model, adamw, searching, strategy=strategy, comm=c)
        for strategy in ("ddp", "zero2"):
            model = network()
            pair = split(model)
            with pytest.raises(Diverged, match=r"rank 0 has 1 model, 2 optimizers \(SGD, AdamW\) .* where rank 1 has"):
                sherd.distribute(model, *(pair if c.rank == 0 else reversed(pair)), strategy=strategy, comm=c)
            with pytest.raises(Diverged, match=r"2 optimizers .* rank 1 has 1 model, an optimizer and"):
                sherd.distribute(model, *pair[: 2 - c.rank], strategy=strategy, comm=c)
            pair[1].param_groups[0]["lr"] += c.rank
            with pytest.raises(Diverged, match=r"differ: of optimizer 1 \(AdamW\), group 0 has lr=0\.01 on rank 0"):
                sherd.distribute(model, *pair, strategy=strategy, comm=c)


def test_ranks_pass_the_same_optimizers_in_the_same_order(ranks):
    ranks(WORLD).run(refused_on_ranks)


def out_of_order(strategy):
    with connected() as c:
        model, *optimizers = both(strategy, comm=c)
        step(model, optimizers, mine(c, 0))
        loss_of(model, mine(c, 1)).backward()
        optimizers[c.rank].step()
        model.zero_grad()
        loss_of(model, mine(c, 2)).backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_step_different_optimizers_are_told_which(ranks, strategy):
    with pytest.raises(Exception, match="out of sync") as caught:
        ranks(WORLD).run(out_of_order, strategy)
    text = str(caught.value)
    assert "step 1 of optimizer 0 (SGD)" in text and "step 1 of optimizer 1 (AdamW)" in text, text


# ---------------------------------------------------------------- gradients that are not finite, state, freezing


def poisoned():
    with connected() as c:
        for strategy in STRATEGIES:
            model, *optimizers = both(strategy, comm=c)
            for bad in range(2):  # the part of the model whose gradient has the NaN
                step(model, optimizers, mine(c, 0))
                before = weights(model)
                loss_of(model, mine(c, 1)).backward()
                parameter = model[2 - 2 * bad].weight
                parameter.grad = torch.full_like(parameter, torch.nan)
                with log_lines() as lines:
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                same(weights(model), before, strategy)
                told = [line for line in lines if "not finite" in line]
                names = [f"step {bad + 1} of optimizer {number}" in line for number, line in enumerate(told)]
                assert names == [True, True] * (c.rank == 0), (strategy, lines)
            step(model, optimizers, mine(c, 2))
            assert differ(weights(model), before)
            assert [gradient.skipped for gradient in training_of(model).engine.gradients] == [2, 2]


def test_all_skip_a_gradient_that_is_not_finite(ranks):
    ranks(WORLD).run(poisoned)


def states():
    with connected() as c:
        for strategy in STRATEGIES:
            model, *optimizers = both(strategy, comm=c)
            plain = double()
            references = split(plain)
            for number in range(3):
                step(model, optimizers, mine(c, number))
                step(plain, references, whole_batch(number, dtype=torch.float64))
            saved = [optimizer.state_dict() for optimizer in optimizers]
            for found, reference in zip(saved, references, strict=True):
                expected = reference.state_dict()
                assert found["param_groups"] == expected["param_groups"]
                for at, kept in expected["state"].items():
                    close(found["state"][at], kept, strategy)
            again, *loaded = both(strategy, comm=c)
            again.load_state_dict(model.state_dict())
            for optimizer, state in zip(loaded, saved, strict=True):
                optimizer.load_state_dict(state)
            for each in ((model, optimizers), (again, loaded)):
                step(*each, mine(c, 3))
            same(weights(again), weights(model), strategy)
            for one, other in zip(loaded, optimizers, strict=True):
                assert_same(one.state_dict(), other.state_dict())


def test_each_has_its_own_state_dict(ranks):
    ranks(WORLD).run(states)


def freezing(added):
    with connected() as c:
        found = {}
        for strategy in STRATEGIES:
            trained = []
            for plain in (True, False):
                model = nn.Sequential(*double(), nn.Linear(5, 5, dtype=torch.float64))
                nn.init.eye_(model[3].weight)
                nn.init.zeros_(model[3].bias)
                model[3].requires_grad_(False)
                pair = split(model)
                late = [model[3].weight] if added else [*model[3].parameters()]
                if not added:
                    pair[1].add_param_group({"params": late, "lr": 0.02})
                if not plain:
                    sherd.distribute(model, *pair, strategy=strategy, comm=c)
                for number in range(6):
                    if number == 2:
                        model[3].requires_grad_(True)  # the bias is in no group if `added`
                    if number == 3 and added:
                        pair[1].add_param_group({"params": late, "lr": 0.02})
                    step(model, pair, whole_batch(number, dtype=torch.float64) if plain else mine(c, number))
                    model.zero_grad()
                trained.append(weights(model))
            close(trained[1], trained[0], strategy)
            found[strategy] = trained[1]
        all_same(found)


@pytest.mark.parametrize("added", [False, True])
def test_what_is_unfrozen_is_stepped_by_the_optimizer_that_has_it(ranks, added):
    ranks(WORLD).run(freezing, added)


# ---------------------------------------------------------------- windows, weights, closures, buckets


def scheduled():
    with connected() as c:
        for strategy in ("ddp", "zero2"):
            model, *optimizers = both(strategy, comm=c, accumulate=K)
            schedules = [lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
            for number in range(2 * K):
                loss_of(model, mine(c, number)).backward()
                for optimizer, schedule in list(zip(optimizers, schedules, strict=True))[: 1 + number % 2]:
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
            assert [schedule.last_epoch for schedule in schedules] == [2, 1]
            assert [gradient.steps for gradient in training_of(model).engine.gradients] == [2, 1]


def test_a_schedule_follows_the_window_of_its_own_optimizer(ranks):
    ranks(WORLD).run(scheduled)


def weighed():
    """The first optimizer's gradient is of one backward, the second's of two; what is not reached does not count."""
    with connected() as c:
        for strategy in STRATEGIES:
            model, last, first = both(strategy, comm=c)
            plain = double()
            of_last, of_first = split(plain)
            rows = [mine(c, number)[0] for number in range(3)]
            counts = [1.0 + c.rank, 3.0 - 2 * c.rank, 5.0]
            for number, part in enumerate((model[:2], model[:2], model)):
                sherd.weigh(model, counts[number])
                part(rows[number]).square().mean().backward()
            last.step()
            first.step()
            everyone = c.all_gather_object((rows, counts))
            total = [sum(counts[number] for _, counts in everyone) for number in range(3)]
            for rows, counts in everyone:
                losses = [p(x).square().mean() for p, x in zip((plain[:2], plain[:2], plain), rows, strict=True)]
                for loss, count in zip(losses, counts, strict=True):
                    (loss * count / sum(total)).backward(inputs=[*plain[0].parameters()], retain_graph=True)
                (losses[2] * counts[2] / total[2]).backward(inputs=[*plain[2].parameters()])
            of_last.step()
            of_first.step()
            close(weights(model), weights(plain), strategy)


def test_each_divides_by_the_weights_of_its_own_backwards(ranks):
    ranks(WORLD).run(weighed)


@pytest.mark.fake
def test_closures_evaluate_for_each():
    found = []
    for distribute in (True, False):
        model = network()
        lbfgs = torch.optim.LBFGS(model[0].parameters(), lr=0.1, max_iter=3)
        sgd = torch.optim.SGD(model[2].parameters(), lr=0.1)
        if distribute:
            sherd.distribute(model, lbfgs, sgd, strategy="ddp")
        for number in range(3):

            def closure(number=number, model=model):
                model.zero_grad()
                loss = loss_of(model, batch(0, number))
                loss.backward()
                return loss

            losses = [float(lbfgs.step(closure)), float(sgd.step(closure))]
            sgd.step()
        found.append({**weights(model), "losses": torch.tensor(losses)})
    same(*found)


def packed():
    with connected() as c:
        for strategy in STRATEGIES:
            model, last, first = both(strategy, comm=c)
            buckets = training_of(model).engine.buckets
            assert [[member.name for member in bucket.members] for bucket in buckets.buckets] == [
                ["2.bias", "2.weight"],
                ["0.bias", "0.weight"],
            ]
            assert [bucket.optimizer for bucket in buckets.buckets] == [last, first]
            assert "optimizer state" in sherd.describe(model)


def test_a_bucket_is_of_one_optimizer_under_every_strategy(ranks):
    ranks(WORLD).run(packed)


def torn(strategy):
    with connected() as c:
        model, last, first = both(strategy, comm=c)
        step(model, (last, first), mine(c, 0))
        saved = model.state_dict(), last.state_dict(), first.state_dict()
        loss_of(model, mine(c, 1)).backward()
        first.param_groups[0]["betas"] = None
        last.step()
        with pytest.raises(TypeError):
            first.step()
        with pytest.raises(SherdError, match=r"step 1 of optimizer 1 \(AdamW\) failed halfway.* of every optimizer"):
            last.step()
        for thing, state in zip((model, last), saved, strict=False):
            thing.load_state_dict(state)
        with pytest.raises(SherdError, match="failed halfway"):
            last.step()
        first.load_state_dict(saved[2])
        step(model, (last, first), mine(c, 1))


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_after_a_failed_update_everything_is_loaded(ranks, strategy):
    ranks(WORLD).run(torn, strategy)
