"""Small models on one host: gradients are taken when a backward has ended, with the same bits as in hooks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

import sherd
from sherd import ConfigError, LossScale, SherdError
from sherd.layout.packing import SMALL_MODEL_BYTES
from tests.helpers.training import (
    STRATEGIES,
    Failing,
    batch,
    connected,
    distributed,
    gradients,
    loss_of,
    same,
    sgd,
    weights,
)

pytestmark = pytest.mark.ranks

WAYS = {"at the end": {}, "in hooks": {"bucket_bytes": 1024}}


def hooks(model):
    """On how many of its four parameters there are hooks."""
    return sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters())


def large():
    return nn.Linear(SMALL_MODEL_BYTES // 4 // 1024, 1025)


def which_have_hooks(transport):
    with connected(transport) as c:
        assert hooks(distributed(c, "zero2")[0]) == 1  # of its one bucket
        assert hooks(distributed(c, "zero2", **WAYS["in hooks"])[0]) == 4
        assert hooks(distributed(c, "zero2", make=large)[0]) == 2
        # What is kept in 16 bits is summed in 32: autograd would add up gradients in 16.
        assert hooks(distributed(c, "zero2", precision="bf16")[0]) == 4
        assert hooks(distributed(c, "zero2", loss_scale=LossScale())[0]) == 4


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_small_models_on_one_host_have_few_hooks(ranks, transport):
    ranks(2).run(which_have_hooks, transport)


class UsedTwice(nn.Module):
    """Reentrant checkpointing runs a backward in the backward: `first` gets its gradient in two parts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(15, 15), nn.Linear(15, 15)

    def forward(self, x):
        for layer in (self.first, self.second, self.first):
            x = checkpoint(layer, x, use_reentrant=True).tanh()
        return x


def muon_and_adamw(model):
    matrices, vectors = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)


def sgd_alone(model):
    return (sgd(model),)


def made_in_parts(transport, make):
    with connected(transport) as c:
        found = {}
        for strategy in STRATEGIES:
            model = UsedTwice()
            model, *optimizers = sherd.distribute(model, *make(model), strategy=strategy, comm=c)
            for step in range(4):
                x = torch.randn(7, 15, generator=torch.Generator().manual_seed(10 * step + c.rank), requires_grad=True)
                model(x).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            found[strategy] = weights(model)
        return found


@pytest.mark.parametrize("make", [sgd_alone, muon_and_adamw])
def test_a_gradient_in_two_parts_has_the_same_bits_under_every_strategy_and_transport(ranks, make):
    """Owned whole, as under Muon, parameters are packed otherwise than under ddp."""
    host, c10d = (ranks(2).run(made_in_parts, transport, make)[0] for transport in ("host", "c10d"))
    for strategy in STRATEGIES:
        same(host[strategy], host["ddp"], strategy)
        same(c10d[strategy], host["ddp"], strategy)


def loop(c, strategy, clip, **options):
    model, optimizer = distributed(c, strategy, **options)
    for step in range(6):
        if step % 3 == 2:
            model[2].requires_grad_(step == 2)
        loss_of(model, batch(c.rank, 2 * step)).backward()
        loss_of(model, batch(c.rank, 2 * step + 1)).backward()
        clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return weights(model)


def the_same_bits(clip):
    with connected() as c:
        for strategy in STRATEGIES:
            found = [loop(c, strategy, clip, **options) for options in WAYS.values()]
            same(*found, strategy)


@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_])
def test_it_is_the_same_training(ranks, clip):
    ranks(2).run(the_same_bits, clip)


def after_a_failure():
    """What came before the failure counts, as in plain torch."""
    plain = distributed_alone()
    with connected() as c:
        for strategy in STRATEGIES:
            model, _ = distributed(c, strategy)
            for each in (plain, model):
                x, y = batch(0)
                with pytest.raises(ValueError, match="no way back"):
                    (each[2](Failing.apply(each[:2](x))) - y).square().mean().backward()
                loss_of(each, batch(0, 1)).backward()
            same(gradients(model), gradients(plain), strategy)
            plain.zero_grad()


def distributed_alone():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(15, 7), nn.Tanh(), nn.Linear(7, 5))


def test_a_backward_that_fails_leaves_what_it_had_made(ranks):
    ranks(2).run(after_a_failure)


def by_kind(model):
    """Two groups: the first parameter of the bucket is not the first that gets a gradient."""
    weights, biases = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    return torch.optim.SGD([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.1)


def refused(way):
    with connected() as c:
        for strategy, make in itertools.product(STRATEGIES, (sgd, by_kind)):
            model, optimizer = distributed(c, strategy, optimizer=make, **WAYS[way])
            with pytest.raises(SherdError, match="create_graph"):
                loss_of(model, batch(c.rank)).backward(create_graph=True)
            assert all(parameter.grad is None for parameter in model.parameters())
            for parameter in (model[0].weight, model[2].bias):
                handle = parameter.register_post_accumulate_grad_hook(lambda parameter: None)
                with pytest.raises(SherdError, match="register_post_accumulate_grad_hook"):
                    loss_of(model, batch(c.rank)).backward()
                handle.remove()
            takers = [parameter.register_post_accumulate_grad_hook(take) for parameter in model.parameters()]
            nn.Linear(1, 1)(torch.ones(1, 1)).backward()  # of another model
            with pytest.raises(SherdError, match="register_post_accumulate_grad_hook"):
                loss_of(model, batch(c.rank)).backward()
            for taker in takers:
                taker.remove()
            loss_of(model, batch(c.rank)).backward()
            optimizer.step()


def take(parameter):
    parameter.grad = None


@pytest.mark.parametrize("way", WAYS)
def test_what_is_refused_in_hooks_is_refused_at_the_end(ranks, way):
    ranks(2).run(refused, way)


def refused_half_way(way):
    """Nothing of a backward that is refused is counted."""
    with connected() as c:
        for strategy, make in itertools.product(STRATEGIES, (sgd, by_kind)):
            once, _ = distributed(c, strategy, optimizer=make, **WAYS[way])
            model, optimizer = distributed(c, strategy, optimizer=make, **WAYS[way])
            for each in (once, model):
                loss_of(each, batch(c.rank)).backward()
            sherd.weigh(model, 3)
            with pytest.raises(ConfigError, match="some backwards of one step were weighed"):
                loss_of(model, batch(c.rank, 1)).backward()
            same(gradients(model), gradients(once), strategy)
            optimizer.step()


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_a_refused_backward_is_counted(ranks, way):
    ranks(2).run(refused_half_way, way)


def scaled_together():
    """Numbers are multiplied in parts, without sending anything; what was gathered, whole."""
    with connected("c10d") as c:
        found = {}
        for strategy in STRATEGIES:
            model, _ = distributed(c, strategy, optimizer=sgd)
            loss_of(model, batch(c.rank)).backward()
            its = [parameter.grad for parameter in model.parameters()]
            before = c.counters.total().payload
            torch._foreach_mul_(its, 0.3)
            torch._foreach_div_(its, torch.tensor(1.7))
            assert c.counters.total().payload == before, strategy
            norms = torch._foreach_norm(its)
            torch._foreach_mul_(its, norms)
            torch._foreach_mul_(its, 0.5)
            found[strategy] = gradients(model)
        for strategy in STRATEGIES:
            same(found[strategy], found["ddp"], strategy)


def test_all_gradients_are_scaled_in_one_call(ranks):
    ranks(2).run(scaled_together)
