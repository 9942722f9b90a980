"""Parameters that are edited, loaded, replaced, moved, saved and copied after `distribute`."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import sherd
from sherd import ConfigError, Diverged, SherdError
from tests.helpers.training import (
    STRATEGIES,
    all_same,
    batch,
    connected,
    differ,
    distributed,
    loss_of,
    network,
    same,
    sgd,
    train,
    weights,
)


def mul(model):
    with torch.no_grad():
        model[2].weight.mul_(2)


def to_double(model):
    model.to(torch.float64)


def to_half(model):
    model.half()


def put_another(model):
    model[2].weight = nn.Parameter(torch.zeros(5, 7))


REFUSED = [  # the edit, and what the error says beside the name
    (to_double, "is now torch.float64 .* distributed as torch.float32.*before sherd.distribute"),
    (to_half, "is now torch.float16 .* distributed as torch.float32.*before sherd.distribute"),
    (put_another, "replaced by another object.*full_parameters"),
]


def refused_edits():
    with connected() as c:
        for strategy in STRATEGIES:
            for edit, message in REFUSED:
                model, optimizer = distributed(c, strategy)
                train(model, optimizer, [batch(c.rank)])
                loss_of(model, batch(c.rank, 1)).backward()
                edit(model)
                name = "0.weight" if edit in (to_double, to_half) else "2.weight"
                try:
                    with pytest.raises(SherdError, match=f"(?s)rank {c.rank}: parameter '{name}'.*{message}"):
                        optimizer.step()
                except BaseException as error:
                    raise AssertionError((strategy, edit.__name__)) from error


def test_what_no_comparison_can_mend_is_refused_by_name(ranks):
    ranks(2).run(refused_edits)


def edits_under_ddp():
    """Every rank has its own: the same edit everywhere is what torch would do."""
    with connected() as c:
        model, optimizer = distributed(c, "ddp")
        mul(model)
        train(model, optimizer, [batch(c.rank)])


def test_under_ddp_a_rank_may_edit_its_own(ranks):
    ranks(2).run(edits_under_ddp)


def kept_edits(transport):
    with connected(transport) as c:
        found = {}
        for strategy in (*STRATEGIES, sherd.ZeRO(stage=2, share_host_memory=False)):
            model, optimizer = distributed(c, strategy, check="edits")
            train(model, optimizer, [batch(c.rank)])
            start = weights(model)
            with sherd.full_parameters(model):
                same(weights(model), start)
                mul(model)
                model[0].bias.data.fill_(c.world)
            assert torch.equal(model[2].weight, 2 * start["2.weight"])
            assert torch.equal(model[0].bias, torch.full((7,), 2.0))
            with sherd.full_parameters(model[0]):
                nn.init.constant_(model[0].weight, 0.25)
            with sherd.full_parameters(model):
                pass
            edited = weights(model)
            for kind, edit in (("different", c.rank + 1.0), ("exception", 3.0)):
                with pytest.raises((Diverged, KeyError)) as caught, sherd.full_parameters(model):
                    model[0].weight.data.fill_(1.0)
                    model[2].bias.data.mul_(edit)
                    if kind == "exception":
                        raise KeyError(kind)
                assert caught.type is KeyError or all(w in str(caught.value) for w in ("'2.bias'", "rank 0", "rank 1"))
                same(weights(model), edited, (strategy, kind))
            train(model, optimizer, [batch(c.rank, 1)])
            found[strategy] = weights(model)
        all_same(found)


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_edits_inside_full_parameters(ranks, transport):
    ranks(2).run(kept_edits, transport)


def step_inside():
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy)
            loss_of(model, batch(c.rank)).backward()
            before = weights(model)
            with pytest.raises(SherdError, match=r"step\(\) inside full_parameters"), sherd.full_parameters(model):
                optimizer.step()
            same(weights(model), before, strategy)
    with pytest.raises(ConfigError, match="not part of a distributed model"), sherd.full_parameters(network()):
        pass


def test_a_step_inside_full_parameters_is_refused(ranks):
    ranks(2).run(step_inside)


class Tied(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        self.body, self.embedding, self.head = network(seed), nn.Embedding(5, 7), nn.Linear(7, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.tensor(float(seed)))

    def forward(self, x):
        return self.body(x) @ self.embedding(torch.arange(5)) @ self.head.weight.T


def loaded(transport):
    with connected(transport) as c:
        found = {}
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, Tied)
            train(model, optimizer, [batch(c.rank)])
            other = Tied(seed=9).state_dict()
            assert model.load_state_dict(other).missing_keys == []
            same(model.state_dict(), other, strategy)
            assert model.head.weight is model.embedding.weight
            model.body.load_state_dict(network(3).state_dict())
            same(model.body.state_dict(), network(3).state_dict(), strategy)
            partial = {"embedding.weight": torch.ones(5, 7), "body.0.bias": torch.zeros(7)}
            assert "head.weight" in model.load_state_dict(partial, strict=False).missing_keys
            assert torch.equal(model.head.weight, torch.ones(5, 7))
            train(model, optimizer, [batch(c.rank, 1)])
            before = weights(model)
            for wrong, kind in (({"seen": torch.ones(())}, RuntimeError), ({"seen": torch.ones(3)}, RuntimeError)):
                with pytest.raises(kind):  # torch's own: missing keys, sizes
                    model.load_state_dict(wrong)
            with pytest.raises(ConfigError, match=r"assign=True.*write load_state_dict\(state\)"):
                model.load_state_dict(other, assign=True)
            same(weights(model), before, strategy)
            train(model, optimizer, [batch(c.rank, 2)])
            found[strategy] = weights(model)
        all_same(found)


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_load_state_dict(ranks, transport):
    ranks(2).run(loaded, transport)


def old_graphs():
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy)
            old = loss_of(model, batch(c.rank))
            train(model, optimizer, [batch(c.rank)])
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                old.backward()


def test_a_backward_through_a_graph_from_before_the_step_raises_as_in_torch(ranks):
    ranks(2).run(old_graphs)


def copies():
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy)
            train(model, optimizer, [batch(c.rank)])
            before = weights(model)
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            state = torch.load(file)
            same(state, before, strategy)
            assert list(state) == list(network().state_dict())
            fresh = network(5)
            fresh.load_state_dict(state)
            for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fresh):
                same(weights(twin), before, strategy)
                assert {type(p) for p in twin.parameters()} == {nn.Parameter}
                if c.rank == 0:  # alone: nothing in it is collective
                    train(twin, sgd(twin), [batch(0)])
                    assert differ(weights(twin), before)
                    loss_of(twin, batch(0)).backward()
                    assert all(p.grad is not None for p in twin.parameters())
                    twin.load_state_dict(state)
                    twin.load_state_dict(state, assign=True)
                    twin.half()
            one = pickle.loads(pickle.dumps(model[0].weight))
            assert type(one) is nn.Parameter and torch.equal(one, model[0].weight)
            assert type(copy.deepcopy(model[0].weight)) is nn.Parameter
            same(weights(model), before, strategy)
            train(model, optimizer, [batch(c.rank)])


def test_saved_and_copied_models_are_plain_and_independent(ranks):
    ranks(2).run(copies)
