"""Before the first step `describe` shows the optimizer state that will be there after it: exactly, for torch's own."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import sherd
from sherd.engine.optimizer.elementwise import why_not_elementwise
from tests.helpers.training import STRATEGIES, batch, connected, loss_of

OPTIMIZERS = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "foreach": True}),
    ("AdamW", {}),
    ("AdamW", {"fused": True}),
    ("AdamW", {"lr": torch.tensor(1e-3)}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adagrad", {}),
    ("Adadelta", {}),
    ("ASGD", {}),
    ("Rprop", {}),
    ("Adafactor", {}),
]


class Mixed(nn.Module):
    """Parameters of every number of dimensions, one of them frozen, and of two dtypes."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(15, 700)
        self.outside = nn.Linear(700, 5).double()
        self.scale = nn.Parameter(torch.ones(()))
        self.cube = nn.Parameter(torch.ones(2, 3, 4))
        self.frozen = nn.Parameter(torch.ones(9), requires_grad=False)

    def forward(self, x):
        return self.outside(self.inside(x).double() * self.scale * self.cube.mean())


def state_line(text):
    kept = re.search(r"^  optimizer state +([\d,]+) +([\d,]+) +[\d.]+$", text, re.M).groups()
    return [int(number.replace(",", "")) for number in kept]


def forecasts(strategies):
    found = []
    with connected() as c:
        for name, options in OPTIMIZERS:
            for strategy in strategies:
                model = Mixed()
                groups = [
                    {"params": list(model.inside.parameters())},
                    {"params": [model.cube, model.scale, model.frozen]},
                ]
                groups.append({"params": list(model.outside.parameters()), "weight_decay": 0.1})
                optimizer = getattr(torch.optim, name)(groups, **options)
                if strategy != "ddp" and why_not_elementwise(optimizer):
                    continue
                sherd.distribute(model, optimizer, strategy=strategy, comm=c)
                state = torch.get_rng_state()
                before = sherd.describe(model)
                assert torch.equal(torch.get_rng_state(), state)
                loss_of(model, batch(c.rank)).backward()
                optimizer.step()
                found.append((name, strategy, before, sherd.describe(model)))
    return found


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.fuzz), 2])
def test_the_state_after_the_first_step_is_foretold(ranks, world):
    seen = set()
    for found in ranks(world).run(forecasts, ("ddp", "zero2")):
        for name, strategy, before, after in found:
            assert state_line(before) == state_line(after), (name, strategy, before, after)
            assert "after the first step" not in after
            assert ("after the first step" in before) == (state_line(after)[1] > 0 and name != "Adagrad")
            seen.add((name, strategy))
    accepted = {name for name, strategy in seen if strategy == "zero2"}
    assert accepted >= {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta"}
    assert ("Adafactor", "ddp") in seen


class Stubborn(torch.optim.SGD):
    """Cannot be tried out."""

    def step(self, closure=None):
        if all(p.numel() < 100 for group in self.param_groups for p in group["params"]):
            raise RuntimeError("too small")
        return super().step(closure)


@pytest.mark.fake
def test_what_cannot_be_foretold_is_left_out():
    model = nn.Linear(40, 30)
    optimizer = Stubborn(model.parameters(), lr=0.1, momentum=0.9)
    sherd.distribute(model, optimizer, strategy="ddp")
    text = sherd.describe(model)
    assert state_line(text) == [0, 0] and "after the first step" not in text


def loaded():
    """State that is there already is not counted twice."""
    found = []
    with connected() as c:
        for strategy in STRATEGIES:
            texts = []
            saved = None
            for _ in range(2):
                model = Mixed()
                optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
                sherd.distribute(model, optimizer, strategy=strategy, comm=c)
                if saved is not None:
                    optimizer.load_state_dict(saved)
                    texts.append(sherd.describe(model))
                loss_of(model, batch(c.rank)).backward()
                optimizer.step()
                saved = optimizer.state_dict()
                texts.append(sherd.describe(model))
            found.append([state_line(text) for text in texts])
            assert not any("after the first step" in text for text in texts)
    return found


def test_loaded_state_is_counted_once(ranks):
    for found in ranks(2).run(loaded):
        assert all(len({tuple(line) for line in lines}) == 1 for lines in found)
