"""Corners of training in teams: orders of backwards, other models, validation in inference mode, partial loads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sherd
from sherd.errors import SherdError
from tests.helpers.training import batch, connected, loss_of, network, same, sgd, train, weights

pytestmark = pytest.mark.ranks


class Branches(nn.Module):
    """Two layers of one size, used in an order that the caller says."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x, flip):
        one, other = (self.b, self.a) if flip else (self.a, self.b)
        first, second = one(x), other(x)
        return ((2 if one is self.a else 1) * first + (2 if other is self.a else 1) * second).sum()


def other_orders(strategy):
    """The gradients of three summed steps, where rank 1 uses the layers in the other order."""
    with connected() as c:
        torch.manual_seed(0)
        model = Branches()
        model, optimizer = sherd.distribute(model, sgd(model, lr=1e-3), strategy=strategy, comm=c, bucket_bytes=16384)
        found = []
        for _ in range(3):
            model(torch.full((1, 64), 1.0 + c.rank), c.rank == 1).backward()
            found.append([parameter.grad.mean().item() for parameter in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        return found


@pytest.mark.parametrize("strategy", [sherd.LocalSGD(warmup=5), sherd.Gossip(warmup=5)], ids=["local-sgd", "gossip"])
def test_in_a_warm_up_all_ranks_launch_in_one_order(ranks, strategy):
    for rank in ranks(2).run(other_orders, strategy):
        assert rank == [[3.0, 1.5]] * 3


def another_model():
    """Rank 0 trains a model of its own beside the distributed one."""
    with connected() as c:
        model = network(dtype=torch.float64)
        model, optimizer = sherd.distribute(model, sgd(model), strategy=sherd.LocalSGD(every=1), comm=c)
        probe, own = network(dtype=torch.float64), network(dtype=torch.float64)
        mine = sgd(own)
        for _ in range(3 if c.rank == 0 else 0):
            loss_of(probe, batch(0, dtype=torch.float64)).backward()
        train(own, mine, [batch(c.rank, dtype=torch.float64)])
        train(model, optimizer, [batch(c.rank, dtype=torch.float64)])
        return weights(own), weights(model)


def test_backwards_of_other_models_count_nothing(ranks):
    (one, found), (other, same_as) = ranks(2).run(another_model)
    same(found, same_as)
    for name, value in found.items():
        torch.testing.assert_close(value, (one[name] + other[name]) / 2, rtol=1e-12, atol=1e-14)


class Statistics(nn.Module):
    """Registers another tensor as its buffer in every forward."""

    def __init__(self):
        super().__init__()
        self.layer = network()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean = 0.5 * self.mean + x.detach().mean()
        return self.layer(x)


def validated():
    with connected() as c:
        model = Statistics()
        model, optimizer = sherd.distribute(model, sgd(model), strategy=sherd.LocalSGD(every=2), comm=c)
        train(model, optimizer, [batch(c.rank, 0)])
        before = model.mean.clone()
        with torch.inference_mode(), sherd.consensus(model):
            inside = model.mean.clone()
            with pytest.raises(SherdError, match="would be lost"):
                model.load_state_dict(model.state_dict())
            with pytest.raises(SherdError, match="would be lost"), sherd.full_parameters(model):
                pass
        after = model.mean.clone()
        loss = loss_of(model, batch(c.rank, 1))
        sherd.describe(model)  # changes nothing that a backward needs
        loss.backward()
        optimizer.step()
        return before, inside, after, weights(model)


def test_validation_in_inference_mode_leaves_everything_as_it_was(ranks):
    (before, inside, after, ours), (other, same_as, others_after, theirs) = ranks(2).run(validated)
    assert not torch.equal(before, other) and torch.equal(inside, same_as)
    assert torch.equal(before, after) and torch.equal(other, others_after)
    same(ours, theirs)  # an exchange


def part_loaded():
    with connected() as c:
        model = network()
        strategy = sherd.DiLoCo(every=4, outer_dtype="bf16")
        model, optimizer = sherd.distribute(model, sgd(model), strategy=strategy, comm=c)
        train(model, optimizer, [batch(c.rank, step) for step in range(6)])
        model[0].load_state_dict(network(seed=3)[0].state_dict())
        loaded = weights(model)
        train(model, optimizer, [batch(c.rank, step) for step in (6, 7)])
        return loaded, weights(model)


def test_where_a_part_is_loaded_all_teams_are_equal_and_stay_so(ranks):
    (loaded, ours), (theirs_loaded, theirs) = ranks(2).run(part_loaded)
    same(loaded, theirs_loaded)
    same(ours, theirs)


def slower_optimizer():
    """Of two optimizers, one steps half as often; what it has made after each of its steps."""
    with connected() as c:
        model = network()
        fast, slow = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2]))
        strategy = sherd.DiLoCo(every=2, warmup=4, outer_momentum=0.5)
        model, fast, slow = sherd.distribute(model, fast, slow, strategy=strategy, comm=c)
        found = []
        for step in range(20):
            loss_of(model, batch(c.rank, step)).backward()
            fast.step()
            if step % 2:
                slow.step()
                found.append(model[2].weight.detach().clone())
            model.zero_grad()
            for optimizer in (fast, slow):
                optimizer.zero_grad()
        return found


def test_a_warm_up_ends_for_all_optimizers_together(ranks):
    ours, theirs = ranks(2).run(slower_optimizer)
    equal = [torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)]
    assert all(equal[:4]), "summed"
    assert all(equal[5::2]), "every second step of its own is an exchange"


def no_data_here():
    """Rank 1 has no tokens in this step."""
    with connected() as c:
        model = network()
        model, optimizer = sherd.distribute(model, sgd(model), strategy=sherd.LocalSGD(every=1), comm=c)
        sherd.weigh(model, 5 if c.rank == 0 else 0)
        train(model, optimizer, [batch(c.rank)])
        return weights(model)


def test_a_rank_may_weigh_nothing(ranks):
    ours, theirs = ranks(2).run(no_data_here)
    same(ours, theirs)
