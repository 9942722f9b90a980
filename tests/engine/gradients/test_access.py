"""`p.grad`: what is read, set, clipped and dropped is what torch would have; never a silently wrong number."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sherd
from sherd import ConfigError, SherdError
from tests.helpers.training import (
    SHARDED,
    STRATEGIES,
    adamw,
    all_same,
    batch,
    close,
    connected,
    distributed,
    double,
    gradients,
    loss_of,
    same,
    train,
    weights,
    whole_batch,
)


def seen(transport):
    plain = double()
    loss_of(plain, whole_batch(dtype=torch.float64)).backward()
    with connected(transport) as c:
        found = {}
        for strategy in STRATEGIES:
            model, _ = distributed(c, strategy, double)
            assert set(gradients(model).values()) == {None}
            loss_of(model, batch(c.rank, dtype=torch.float64)).backward()
            found[strategy] = gradients(model)
            close(found[strategy], gradients(plain), strategy)
            same({n: sherd.full_grad(p) for n, p in model.named_parameters()}, found[strategy], strategy)
        all_same(found)


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_gradients_are_those_of_one_process(ranks, transport):
    ranks(2).run(seen, transport)


def clipped(transport):
    plain = double()
    loss_of(plain, whole_batch(dtype=torch.float64)).backward()
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()

    def by_torch(model):
        return nn.utils.clip_grad_norm_(model.parameters(), expected / 3).item()

    def by_value(model):
        nn.utils.clip_grad_value_(model.parameters(), expected / 30)
        return expected

    def by_data(model):  # as older scripts write it; versions do not tell of it
        for parameter in model.parameters():
            parameter.grad.data.clamp_(-expected / 30, expected / 30)
        return expected

    def by_sherd(model):
        return sherd.clip_grad_norm_(model, expected / 3).item()

    with connected(transport) as c:
        found = {}
        for strategy in STRATEGIES:
            for clip in (by_torch, by_value, by_data, by_sherd, None):
                options = {} if clip else {"clip_norm": expected / 3}
                model, optimizer = distributed(c, strategy, double, **options)
                norms = []
                for step in range(3):
                    loss_of(model, batch(c.rank, step, dtype=torch.float64)).backward()
                    if clip:
                        norms.append(clip(model))
                        after = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
                        assert after <= expected / 3 * 1.1, (strategy, clip)
                    optimizer.step()
                    optimizer.zero_grad()
                assert not clip or abs(norms[0] / expected - 1) < 1e-6, (strategy, clip, norms)
                norms = {"norms": torch.tensor(norms)} if clip else {}
                found.setdefault(clip, {})[strategy] = {**weights(model), **norms}
        for results in found.values():
            all_same(results)
        for strategy in STRATEGIES:
            found[by_sherd][strategy].pop("norms")
            same(found[None][strategy], found[by_sherd][strategy], strategy)
            same(found[by_data][strategy], found[by_value][strategy], strategy)


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_clipping_by_torch_by_hand_and_by_sherd(ranks, transport):
    ranks(2).run(clipped, transport)


def read_again():
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, double)
            loss_of(model, batch(c.rank, dtype=torch.float64)).backward()
            before = gradients(model)
            norm = sherd.clip_grad_norm_(model, 0.01).item()
            close(gradients(model), {name: g * (0.01 / norm) for name, g in before.items()}, strategy, rtol=1e-3)
            optimizer.zero_grad(set_to_none=False)
            same(gradients(model), {name: torch.zeros_like(g) for name, g in before.items()}, strategy)
            optimizer.zero_grad()
            assert set(gradients(model).values()) == {None}


def test_what_was_read_before_is_not_read_again(ranks):
    ranks(2).run(read_again)


@pytest.mark.fake
def test_a_norm_that_cannot_be():
    model, _ = distributed(None, "zero2")
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="write a number above 0"):
            sherd.clip_grad_norm_(model, wrong)


def drop(model):
    model[0].bias.grad = None


def replace(model):
    model[0].bias.grad = torch.arange(7.0, dtype=torch.float64)


def double_it(model):
    model[0].bias.grad.mul_(2)
    model[2].bias.grad += 1


def put_where_none_is(model):
    for parameter in model.parameters():
        parameter.grad = None
    model[2].bias.grad = torch.ones(5, dtype=torch.float64)


def drop_and_go_on(model):
    model[0].bias.grad = None
    model(torch.ones(1, 15, dtype=torch.float64)).sum().backward()


def changed():
    with connected() as c:
        for change in (drop, replace, double_it, put_where_none_is, drop_and_go_on):
            plain = double()
            reference = adamw(plain)
            found = {}
            for strategy in STRATEGIES:
                model, optimizer = distributed(c, strategy, double, adamw)
                ours = [(model, optimizer, batch(c.rank, dtype=torch.float64))]
                if strategy == STRATEGIES[0]:
                    ours.append((plain, reference, whole_batch(dtype=torch.float64)))
                for each, steps, data in ours:
                    start = weights(each)
                    loss_of(each, data).backward()
                    change(each)
                    steps.step()
                    assert (change is drop) == torch.equal(each[0].bias, start["0.bias"]) or change is put_where_none_is
                    steps.zero_grad()
                    train(each, steps, [data])  # and nothing of it stays
                close(weights(model), weights(plain), (change.__name__, strategy))
                assert optimizer.state_dict()["state"][1]["step"] == reference.state_dict()["state"][1]["step"]
                found[strategy] = weights(model)
            all_same(found)


def test_gradients_that_are_dropped_replaced_and_edited(ranks):
    ranks(2).run(changed)


def alone(strategy, what):
    with connected(timeout=10) as c:
        model, optimizer = distributed(c, strategy)
        loss_of(model, batch(c.rank)).backward()
        try:
            if c.rank == 1:
                if what == "read":
                    model[0].weight.grad.sum()
                else:
                    model[0].bias.grad = None if what == "drop" else torch.ones(7)
            optimizer.step()
            c.barrier().wait()
        except SherdError as error:
            return str(error)
        return weights(model)


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("what", ["read", "set", "drop"])
def test_a_rank_that_reads_or_sets_a_gradient_alone_is_named(ranks, strategy, what):
    found = ranks(2).run(alone, strategy, what)
    assert all(isinstance(text, str) and "rank 0" in text and "rank 1" in text for text in found), found


def test_under_ddp_a_rank_may_read_alone(ranks):
    same(*ranks(2).run(alone, "ddp", "read"))
