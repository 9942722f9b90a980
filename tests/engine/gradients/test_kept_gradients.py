"""Gradients that a program keeps stay what they were, as in plain torch; most programs keep none, and pay nothing."""

from __future__ import annotations

import pytest
import torch

import sherd
from sherd.api.training import training_of
from tests.helpers.training import (
    STRATEGIES,
    all_same,
    batch,
    close,
    connected,
    distributed,
    double,
    loss_of,
    network,
    sgd,
    train,
    weights,
    whole_batch,
)

PRIVATE = sherd.ZeRO(stage=2, share_host_memory=False)
EVERY = (*STRATEGIES, PRIVATE)


class Remembering(torch.optim.Optimizer):
    """Steps along the gradient and along its difference from the last one, which it keeps as it is."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    last = self.state[parameter].get("last", parameter.grad)
                    parameter.sub_(parameter.grad + 0.5 * (parameter.grad - last), alpha=group["lr"])
                    self.state[parameter]["last"] = parameter.grad


def remembering(model):
    return Remembering(model.parameters())


def plain(steps, optimizer=remembering):
    model = double()
    train(model, optimizer(model), [whole_batch(step, dtype=torch.float64) for step in range(steps)])
    return weights(model)


def remembered(transport):
    with connected(transport) as c:
        found = {}
        for strategy in EVERY:
            model, optimizer = distributed(c, strategy, double, remembering)
            train(model, optimizer, [batch(c.rank, step, dtype=torch.float64) for step in range(8)])
            found[strategy] = weights(model)
        all_same(found)
        return found["ddp"]


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_an_optimizer_that_remembers_the_last_gradient(ranks, transport):
    for found in ranks(2).run(remembered, transport):
        close(found, plain(8))


@pytest.mark.fake
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_in_a_world_of_one(strategy):
    model = double()
    model, optimizer = sherd.distribute(model, remembering(model), strategy=strategy)
    train(model, optimizer, [whole_batch(step, dtype=torch.float64) for step in range(8)])
    close(weights(model), plain(8))


def kept(how):
    """What is kept over many steps, and by views of it, stays; `how` it is dropped makes no difference."""
    with connected() as c:
        for strategy in EVERY:
            model, optimizer = distributed(c, strategy)
            history = []
            for step in range(7):
                loss_of(model, batch(c.rank, step)).backward()
                found = [parameter.grad for parameter in model.parameters()]
                if step % 2:
                    found = [gradient.view(-1)[1:] for gradient in found]
                history.append((found, [gradient.clone() for gradient in found]))
                optimizer.step()
                if how == "optimizer":
                    optimizer.zero_grad()
                elif how == "model":
                    model.zero_grad()
                else:
                    for parameter in list(model.parameters())[:-1]:
                        parameter.grad = None
                    if step == 3:
                        optimizer.zero_grad()
                for tensors, copies in history:
                    for tensor, copy in zip(tensors, copies, strict=True):
                        if how != "partly" or tensor is not tensors[-1]:
                            assert torch.equal(tensor, copy), (strategy, step)


@pytest.mark.parametrize("how", ["optimizer", "model", "partly"])
def test_gradients_that_are_kept_stay_what_they_were(ranks, how):
    ranks(2).run(kept, how)


def kept_and_set():
    """`p.grad = x` leaves alone what `p.grad` was before, and counts."""
    with connected() as c:
        found = {}
        for strategy in EVERY:
            model, optimizer = distributed(c, strategy)
            for step in range(3):
                loss_of(model, batch(c.rank, step)).backward()
                kept = [parameter.grad for parameter in model.parameters()]
                before = [gradient.clone() for gradient in kept]
                for parameter, gradient in zip(model.parameters(), kept, strict=True):
                    parameter.grad = gradient * 0.5
                    assert torch.equal(parameter.grad, gradient * 0.5)
                kept[1].mul_(3.0)  # no longer the gradient of anything
                optimizer.step()
                before[1] *= 3.0
                assert all(map(torch.equal, kept, before)), strategy
                optimizer.zero_grad()
            found[strategy] = weights(model)
        all_same(found)
        with pytest.raises(RuntimeError, match="size"):
            model[0].weight.grad = torch.zeros(3)


def test_setting_a_gradient_leaves_the_last_one_alone(ranks):
    ranks(2).run(kept_and_set)


def as_in_torch():
    """A gradient that is not dropped is added to in place, and whoever keeps it sees that."""
    with connected() as c:
        model, optimizer = distributed(c, "ddp")
        loss_of(model, batch(c.rank)).backward()
        first = model[0].weight.grad
        before = first.clone()
        loss_of(model, batch(c.rank)).backward()
        assert torch.equal(first, model[0].weight.grad) and not torch.equal(first, before)
        optimizer.zero_grad(set_to_none=False)
        assert not first.any()


def test_gradients_that_add_up_do_so_in_place(ranks):
    ranks(2).run(as_in_torch)


def nothing_kept(accumulate):
    with connected() as c:
        for strategy in EVERY:
            for optimizer in (sgd, lambda model: torch.optim.AdamW(model.parameters(), fused=True)):
                model, optimizer = distributed(c, strategy, optimizer=optimizer, accumulate=accumulate, clip_norm=0.1)
                engine = training_of(model).engine
                bytes_before = engine.gradient_bytes()["gradients"]
                for step in range(8):
                    loss_of(model, batch(c.rank, step)).backward()
                    if accumulate == 1 and step % 2:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
                assert engine.gradient_bytes()["gradients"] == bytes_before, strategy
                first = model[0].weight.grad if accumulate == 1 else None
                assert first is None


@pytest.mark.parametrize("accumulate", [1, 3])
def test_who_keeps_nothing_pays_nothing(ranks, accumulate):
    ranks(2).run(nothing_kept, accumulate)


def released():
    """Memory that is no longer held is used again."""
    with connected() as c:
        model, optimizer = distributed(c, "zero2", network)
        sizes, kept = [], []
        for step in range(8):
            loss_of(model, batch(c.rank, step)).backward()
            optimizer.step()
            kept = [parameter.grad for parameter in model.parameters()]
            optimizer.zero_grad()
            sizes.append(training_of(model).engine.gradient_bytes()["gradients"])
        assert sizes[0] < sizes[2] == sizes[-1] <= 2 * sizes[0], sizes
        assert all(gradient is not None for gradient in kept)


def test_two_gradients_take_the_memory_of_two(ranks):
    ranks(2).run(released)
