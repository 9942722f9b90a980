"""Averaging strategies that cannot be: one clear message each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sherd
from sherd.errors import ConfigError
from sherd.strategies import resolve
from sherd.testing import FakeCommunicator
from tests.helpers.training import connected

CASES = {
    "every=0 must be at least 1": lambda: sherd.LocalSGD(every=0),
    "DiLoCo: every=0 must be at least 1": lambda: sherd.DiLoCo(every=0),
    "warmup=-1 must be at least 0": lambda: sherd.DiLoCo(warmup=-1),
    "unknown outer='slowmoo'; did you mean 'slowmo'": lambda: sherd.LocalSGD(outer="slowmoo"),
    "unknown average='state'": lambda: sherd.LocalSGD(average="state"),
    "average='parameters and optimizer state' must be \"parameters\" with outer='slowmo'": lambda: sherd.LocalSGD(
        outer="slowmo", average="parameters and optimizer state"
    ),
    "slow_momentum=1.0 must be less than 1": lambda: sherd.LocalSGD(slow_momentum=1),
    'over=\'host\' must be "ranks", "hosts" or a number of ranks': lambda: sherd.DiLoCo(over="host"),
    "over=0 must be at least 1": lambda: sherd.DiLoCo(over=0),
    "inner='local-sgd' must be a strategy that sums gradients": lambda: sherd.DiLoCo(inner="local-sgd"),
    "inner='local' must be a strategy that sums gradients": lambda: sherd.DiLoCo(inner="local"),
    "unknown strategy 'zero4'; did you mean": lambda: sherd.DiLoCo(inner="zero4"),
    "outer_lr=0.0 must be a finite number above 0": lambda: sherd.DiLoCo(outer_lr=0),
    "outer_momentum=1.0 must be less than 1": lambda: sherd.DiLoCo(outer_momentum=1),
    "fragments=0 must be at least 1": lambda: sherd.DiLoCo(fragments=0),
    "fragments=9 must be at most every=8": lambda: sherd.DiLoCo(every=8, fragments=9),
    "delay=4 must be less than the 4 steps between two exchanges; write delay=3": lambda: sherd.DiLoCo(
        every=8, fragments=2, delay=4
    ),
    "delay=8 must be less than the 8 steps": lambda: sherd.DiLoCo(every=8, delay=8),
    "mix=0.0 must be above 0 and at most 1": lambda: sherd.DiLoCo(mix=0),
    "unknown outer_dtype='fp8'": lambda: sherd.DiLoCo(outer_dtype="fp8"),
}


@pytest.mark.pure
@pytest.mark.parametrize("text", CASES)
def test_bad_options(text):
    with pytest.raises(ConfigError) as error:
        CASES[text]()
    assert text in str(error.value)


@pytest.mark.pure
def test_other_names():
    with pytest.raises(ConfigError, match="here it is called 'diloco'"):
        resolve("Streaming DiLoCo")
    with pytest.raises(ConfigError, match="here it is called 'local-sgd'"):
        resolve("post-local-SGD")


@pytest.mark.pure
def test_teams():
    comm = FakeCommunicator(0, 6)
    assert [sherd.DiLoCo(over=over).team(comm) for over in ("ranks", "hosts", 2, 3)] == [1, comm.ranks_per_host, 2, 3]
    with pytest.raises(ConfigError, match=r"over=4 must be a number that divides the 6 ranks; write over=\"ranks\""):
        sherd.DiLoCo(over=4).team(comm)


@pytest.mark.fake
def test_a_world_of_one_trains_as_ever():
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    for strategy in (sherd.DiLoCo(every=1, over=2), "local-sgd"):
        model = nn.Linear(3, 2)
        model, optimizer = sherd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), strategy=strategy)
        before = model.weight.detach().clone()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert torch.allclose(model.weight.detach(), before - 0.1)


class Counting(torch.optim.Optimizer):
    """Keeps an integer for every element."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    counts = self.state[p].setdefault("counts", torch.zeros_like(p, dtype=torch.int32))
                    counts.add_(1)
                    p.sub_(group["lr"] * p.grad)


def refused():
    found = []
    with_state = sherd.LocalSGD(average="parameters and optimizer state")
    cases = [
        (with_state, lambda p: torch.optim.LBFGS(p)),
        (with_state, Counting),
        (sherd.DiLoCo(fragments=3), lambda p: torch.optim.SGD(p, 0.1)),
        (sherd.DiLoCo(over=2, inner="zero2"), lambda p: torch.optim.LBFGS(p)),
    ]
    with connected() as c:
        for strategy, make in cases:
            model = nn.Linear(3, 2)
            try:
                sherd.distribute(model, make(model.parameters()), strategy=strategy, comm=c)
                found.append("")
            except ConfigError as error:
                found.append(str(error))
    return found


@pytest.mark.ranks
def test_optimizers_that_cannot_follow(ranks):
    for state, counts, fragments, _ in ranks(2).run(refused):
        assert "LBFGS cannot be used under strategy='local-sgd': its state cannot be averaged" in state
        assert 'write average="parameters"' in state
        assert "it keeps torch.int32 for every element" in counts
        assert "it has 2 trainable parameters, which cannot be cut into fragments=3; write fragments=2" in fragments
