"""Backwards out of the ordinary: refused by name, without an optimizer, with parts missing or arriving again."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sherd
from sherd import ConfigError, SherdError
from sherd.api.training import training_of
from tests.helpers.training import (
    SHARDED,
    STRATEGIES,
    WORLD,
    all_same,
    batch,
    close,
    connected,
    differ,
    distributed,
    double,
    gradients,
    loss_of,
    sgd,
    train,
    weights,
    whole_batch,
)


def mine(c, step=0):
    return batch(c.rank, step, dtype=torch.float64)


# -------------------------------------------------------------------- what is refused


def penalised(model, data):
    """A loss with the square of its own gradient."""
    loss = loss_of(model, data)
    inner = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(gradient.square().sum() for gradient in inner)


def graph_of_gradients():
    plain = double()
    for rank in range(WORLD):
        (penalised(plain, batch(rank, dtype=torch.float64)) / WORLD).backward()
    with connected() as c:
        for strategy in STRATEGIES:
            model, _ = distributed(c, strategy, double)
            with pytest.raises(SherdError, match=r"take the inner gradient with torch\.autograd\.grad"):
                loss_of(model, mine(c)).backward(create_graph=True)
            penalised(model, mine(c)).backward()  # and this is how
            close(gradients(model), gradients(plain), strategy)


def test_create_graph_is_refused_and_the_way_that_is_named_works(ranks):
    ranks(2).run(graph_of_gradients)


def unnoticed():
    plain = double()
    loss_of(plain, whole_batch(dtype=torch.float64)).backward()
    with connected() as c:
        for strategy in STRATEGIES:
            model, _ = distributed(c, strategy, double)
            imported_early = inspect.unwrap(torch.autograd.backward)
            assert imported_early is not torch.autograd.backward
            with pytest.raises(SherdError, match="its end would go unnoticed"):
                imported_early(loss_of(model, mine(c)))
            loss_of(model, mine(c)).backward()
            close(gradients(model), gradients(plain), strategy)


def test_a_backward_whose_end_would_go_unnoticed_is_refused(ranks):
    ranks(2).run(unnoticed)


# -------------------------------------------------------------------- without an optimizer


def own_optimizer(strategy):
    plain = double()
    train(plain, sgd(plain), [whole_batch(step, dtype=torch.float64) for step in range(5)])
    with connected() as c:
        model = double()
        optimizer = sgd(model)
        sherd.distribute(model, strategy=strategy, comm=c)
        batches = [mine(c, step) for step in range(5)]
        if strategy == "ddp":
            train(model, optimizer, batches)
            close(weights(model), weights(plain))
        else:
            with pytest.raises(ConfigError, match=r"this SGD steps .* was not passed.*write model, "):
                train(model, optimizer, batches)


def test_under_ddp_an_optimizer_need_not_be_distributed(ranks):
    ranks(2).run(own_optimizer, "ddp")


@pytest.mark.parametrize("strategy", SHARDED)
def test_under_zero_an_optimizer_that_was_not_distributed_is_refused(ranks, strategy):
    ranks(2).run(own_optimizer, strategy)


# -------------------------------------------------------------------- what does not come, and what comes again


def waiting():
    """The largest share of a gradient that waited to be reduced, in each of some backwards."""
    layers, peaks = 40, []
    with connected() as c:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
        _, optimizer = sherd.distribute(model, sgd(model), strategy="zero2", comm=c, bucket_bytes=16_384)
        members = training_of(model).engine.buckets.parameters
        whole = sum(parameter.nbytes for parameter in model.parameters())

        def look(_):
            peaks[-1] = max(
                peaks[-1], sum(each.contribution.nbytes for each in members if each.contribution is not None) / whole
            )

        for parameter in model.parameters():
            parameter.register_hook(look)
        for step in range(6):
            peaks.append(0.0)
            used = layers - step % 2  # the last layer is the first of a backward
            model[:used](torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return peaks


def test_gradients_do_not_pile_up_behind_one_that_does_not_come(ranks):
    for peaks in ranks(2).run(waiting):
        assert 0 < max(peaks) < 1 / 3, peaks


class Repeated(nn.Module):
    """A block that is used three times, each time in a checkpoint with a backward of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(15, 15)
        self.block = nn.Sequential(nn.Linear(15, 15), nn.Linear(15, 15), nn.Tanh())
        self.last = nn.Linear(15, 5)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=True)
        return self.last(x)


def repeated(options):
    with connected() as c:
        found = {}
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, Repeated, bucket_bytes=4096, **options)
            before = weights(model)
            train(model, optimizer, [batch(c.rank, step) for step in range(12)])
            assert differ(weights(model), before), strategy
            found[strategy] = weights(model)
        all_same(found)


@pytest.mark.parametrize("options", [{}, {"accumulate": 3, "accumulate_at": "owner"}], ids=["plain", "accumulated"])
def test_gradients_that_arrive_several_times_give_the_same_bits(ranks, options):
    ranks(2).run(repeated, options)
