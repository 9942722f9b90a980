"""ddp steps through the shard, too: what a user may do to parameters and state where a rank has all of them."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn, optim

import sherd
from sherd.engine.optimizer import forecast
from sherd.engine.optimizer.forecast import merging_pays
from sherd.engine.optimizer.shard import OptimizerShard
from sherd.engine.optimizer.unsplit import UnsplitOptimizer
from sherd.errors import SherdError
from tests.helpers.training import (
    STRATEGIES,
    all_same,
    batch,
    close,
    connected,
    distributed,
    loss_of,
    same,
    train,
    weights,
)


class Moving(optim.Optimizer):
    """Puts new tensors in the place of old ones; with `whole`, by a rule for whole parameters."""

    def __init__(self, params, lr=0.1, whole=False):
        super().__init__(params, {"lr": lr, "whole": whole})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    scale = parameter.grad.norm() if group["whole"] else 1.0
                    parameter.data = parameter.data - group["lr"] * parameter.grad / scale


def moving():
    with connected() as c:
        found = {}
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, optimizer=lambda m: Moving(m.parameters()))
            train(model, optimizer, [batch(c.rank, step) for step in range(3)])
            found[strategy] = weights(model)
        model, optimizer = distributed(c, "ddp", optimizer=lambda m: optim.SGD(m.parameters(), 0.1))
        train(model, optimizer, [batch(c.rank, step) for step in range(3)])
        all_same(found)
        close(weights(model), found["ddp"], rtol=1e-5)
        model, optimizer = distributed(c, "ddp", optimizer=lambda m: Moving(m.parameters(), whole=True))
        before = weights(model)
        train(model, optimizer, [batch(c.rank, step) for step in range(3)])
        with sherd.full_parameters(model):  # reads what the store has
            inside = weights(model)
        same(inside, weights(model))
        same(*c.all_gather_object(inside))
        assert all(not torch.equal(before[name], inside[name]) for name in inside)


def test_optimizers_that_put_new_tensors_in_the_place_of_old_ones(ranks):
    ranks(2).run(moving)


def shared():
    with connected() as c:
        found = {}
        for how in ("plain", "shared"):
            for kind in (optim.AdamW, optim.Adafactor):
                model, optimizer = distributed(c, "ddp", optimizer=lambda m, kind=kind: kind(m.parameters(), lr=0.01))
                train(model, optimizer, [batch(c.rank, 0)])
                if how == "shared":
                    model.share_memory()
                # What another process was sent: the same memory.
                views = [torch.from_numpy(parameter.detach().numpy()) for parameter in model.parameters()]
                train(model, optimizer, [batch(c.rank, 1)])
                with torch.no_grad():
                    views[0].add_(0.5)  # and it may write into it
                    model[2].bias.data = model[2].bias.data * 2
                train(model, optimizer, [batch(c.rank, step) for step in (2, 3)])
                found.setdefault(kind, {})[how] = weights(model)
                if how == "shared":
                    assert all(parameter.is_shared() for parameter in model.parameters())
                    for view, parameter in list(zip(views, model.parameters(), strict=True))[:-1]:
                        assert torch.equal(view, parameter)
                state = copy.deepcopy(model.state_dict())
                model.load_state_dict({name: value + 1 for name, value in state.items()})
                assert torch.equal(model[0].weight, state["0.weight"] + 1)
                train(model, optimizer, [batch(c.rank, 4)])
        for each in found.values():
            all_same(each)


def test_shared_memory_under_ddp_is_trained(ranks):
    ranks(2).run(shared)


def kept():
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, optimizer=lambda m: optim.AdamW(m.parameters(), lr=0.01))
            assert isinstance(sherd.api.training.training_of(model).engine.shards[optimizer], OptimizerShard)
            train(model, optimizer, [batch(c.rank, step) for step in range(2)])
            if strategy != "ddp":
                assert not optimizer.state
                continue
            for parameter in model.parameters():
                state = optimizer.state[parameter]
                assert state["exp_avg"].shape == parameter.shape and state["step"] == 2
            buffer = io.BytesIO()
            torch.save(optimizer.state[model[2].bias], buffer)
            assert buffer.tell() < 4000  # not the memory around it
            plain_model, plain = copy.deepcopy((model, optimizer))
            loss_of(plain_model, batch(0, 2)).backward()
            plain.step()
            assert [float(plain.state[p]["step"]) for p in plain_model.parameters()] == [3.0] * 4
            assert [float(optimizer.state[p]["step"]) for p in model.parameters()] == [2.0] * 4
        model, optimizer = distributed(c, "ddp", optimizer=lambda m: optim.Adafactor(m.parameters()))
        assert isinstance(sherd.api.training.training_of(model).engine.shards[optimizer], UnsplitOptimizer)


def test_state_under_ddp_is_in_the_users_object(ranks):
    ranks(2).run(kept)


def channels_last():
    with connected() as c:
        found = {}
        for strategy in STRATEGIES:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 3)).to(
                memory_format=torch.channels_last
            )
            optimizer = optim.AdamW(model.parameters(), lr=0.01)
            sherd.distribute(model, optimizer, strategy=strategy, comm=c)
            for step in range(3):
                generator = torch.Generator().manual_seed(10 * step + c.rank)
                model(torch.randn(2, 3, 8, 8, generator=generator)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found[strategy] = {**weights(model), "moment": optimizer.state_dict()["state"][0]["exp_avg"]}
            assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
            if strategy == "ddp":
                kept = optimizer.state[model[0].weight]["exp_avg"]
                assert kept.stride() == model[0].weight.stride()
        all_same(found)


def test_state_has_the_memory_order_of_its_parameter(ranks):
    ranks(2).run(channels_last)


@pytest.fixture
def mergeable(monkeypatch):
    """Whether merging keeps the bits depends on the CPU; whether it pays is asked all the same."""
    monkeypatch.setattr(forecast, "merging_unit", lambda *_: 1)


@pytest.mark.fake
@pytest.mark.usefixtures("mergeable")
@pytest.mark.parametrize("fused", [False, True])
def test_in_a_world_of_one_parameters_are_stepped_together_where_that_saves_calls(fused):
    """The loop of plain torch, with closures inside a window and a parameter that is moved. Fused kernels take all
    tensors in one call: the user's own optimizer steps, from `p.grad`."""
    plain = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2))
    model = copy.deepcopy(plain)
    theirs, ours = (optim.AdamW(each.parameters(), lr=0.01, fused=fused) for each in (plain, model))
    sherd.distribute(model, ours, accumulate=2)
    shard = sherd.api.training.training_of(model).engine.shards[ours]
    assert isinstance(shard, UnsplitOptimizer) == fused and not shard.takes_closure
    for step in range(3):
        for number in range(2):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2 * step + number))
            (plain(x).square().mean() / 2).backward()

            def closure(x=x):
                loss = model(x).square().mean()
                loss.backward()
                return loss

            assert ours.step(closure) is not None
        theirs.step()
        theirs.zero_grad()
        ours.zero_grad()
        for each in (plain, model):
            each[2].bias.data = each[2].bias.data * 2
    same(dict(model.named_parameters()), dict(plain.named_parameters()))
    assert all(torch.equal(ours.state[p]["exp_avg"], theirs.state[q]["exp_avg"]) for p, q in _pairs(model, plain))
    with sherd.full_parameters(model):  # reads what the store has
        same(dict(model.named_parameters()), dict(plain.named_parameters()))
    model.double()
    model(torch.randn(4, 5, dtype=torch.float64)).sum().backward()
    ours.step()  # inside the window
    with pytest.raises(SherdError, match=r"is now torch\.float64 of shape"):
        ours.step()


def _pairs(model, plain):
    return zip(model.parameters(), plain.parameters(), strict=True)


def small():
    """A model in a world of one whose parameters are stepped together."""
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2))
    ours = optim.AdamW(model.parameters(), lr=0.01)
    sherd.distribute(model, ours)
    return model, ours, torch.ones(4, 5)


@pytest.mark.fake
@pytest.mark.usefixtures("mergeable")
def test_a_graph_from_before_a_step_is_refused_in_a_world_of_one():
    model, optimizer, x = small()
    first, second = model(x).square().mean(), model(x).square().mean()
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


@pytest.mark.fake
@pytest.mark.usefixtures("mergeable")
def test_a_model_in_shared_memory_is_trained_in_a_world_of_one():
    model, optimizer, x = small()
    model.share_memory()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(x).square().mean().backward()
    optimizer.step()
    assert all(parameter.is_shared() for parameter in model.parameters())
    assert not any(map(torch.equal, before, model.parameters()))


class Own(optim.SGD):
    """A user's own."""


@pytest.mark.fake
@pytest.mark.usefixtures("mergeable")
def test_when_stepping_tensors_together_pays():
    def pays(*shapes, kind=optim.AdamW, **options):
        its = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        return merging_pays(kind(its, **{"lr": 0.01, **options}))

    few, many = [(100, 1000)] * 2, [(8, 8)] * 20
    assert pays(*many) and not pays(*few)
    assert not pays(*many, fused=True)
    assert pays(*many, kind=optim.SGD, momentum=0.9)
    assert not pays(*many, kind=Own, momentum=0.9)  # it may look at attributes of parameters
    alone = [{"params": [nn.Parameter(torch.ones(8, 8))]} for _ in range(20)]
    assert not merging_pays(optim.AdamW(alone, lr=0.01))
    partly = [nn.Parameter(torch.ones(8, 8), requires_grad=bool(number)) for number in range(20)]
    assert not merging_pays(optim.AdamW(partly, lr=0.01))
