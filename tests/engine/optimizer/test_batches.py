"""A first step is made a few chunks at a time: what an optimizer counts in its groups is counted once in each."""

from __future__ import annotations

import torch
from torch import nn, optim

import sherd
from sherd.engine.optimizer import shard
from tests.helpers.training import STRATEGIES, connected


class Counting(optim.Optimizer):
    """Counts the steps of a group, and passes over groups without gradients."""

    def __init__(self, groups, lr=0.1):
        super().__init__(groups, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            having = [p for p in group["params"] if p.grad is not None]
            if not having:
                continue
            group["steps"] += 1
            for p in having:
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                moment.mul_(0.9).add_(p.grad)
                p.sub_(moment * (group["lr"] / group["steps"]))


class OfWholes(optim.Optimizer):
    """Needs whole parameters, and makes its state when it is built."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        for p in self.param_groups[0]["params"]:
            self.state[p]["moment"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                moment = self.state[p]["moment"]
                moment.mul_(0.9).add_(p.grad)
                p.sub_(self.param_groups[0]["lr"] * moment / (moment.norm() + 1e-6))


class NoisyTogether(optim.Optimizer):
    """Random, and scales all parameters by one norm."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        having = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = sum(float(p.grad.square().sum()) for p in having) ** 0.5
        for p in having:
            p.sub_(0.1 * p.grad / (norm + 1e-6) + 1e-3 * torch.randn_like(p))


def layers(count):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(count)))


def train(c, strategy, count, make, **options):
    model = layers(count)
    optimizer = make(model)
    model, optimizer = sherd.distribute(model, optimizer, strategy=strategy, comm=c, bucket_bytes=1024, **options)
    for step in range(2):
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(10 * step + c.rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with sherd.full_parameters(model, masters=True):
        found = [p.detach().clone() for p in model.parameters()]
    return [group.get("steps") for group in optimizer.param_groups], found


def counting(model):
    return Counting([{"params": [p]} for p in model.parameters()])


def of_wholes(model):
    return OfWholes(model.parameters())


def runs():
    found = {}
    halves = {"precision": "bf16", "grad_dtype": "bf16"}
    shard.AT_ONCE, before = 1024, shard.AT_ONCE
    with connected() as c:
        for strategy in STRATEGIES:
            found["counting", strategy] = train(c, strategy, 6, counting)
            found["counting in halves", strategy] = train(c, strategy, 6, counting, **halves)
            found["wholes", strategy] = train(c, strategy, 2, of_wholes)
            found["wholes in halves", strategy] = train(c, strategy, 2, of_wholes, **halves)
    shard.AT_ONCE = before
    return found


def test_groups_count_once_and_ranks_without_a_parameter_go_on(ranks):
    for found in ranks(3).run(runs):
        for (what, strategy), (steps, weights) in found.items():
            assert set(steps) == ({2} if "counting" in what else {None}), (what, strategy, steps)
            for one, other in zip(weights, found[what, "ddp"][1], strict=True):
                assert torch.equal(one, other), (what, strategy)


def refused():
    with connected() as c:
        model = layers(2)
        try:
            sherd.distribute(model, NoisyTogether(model.parameters()), strategy="zero2", comm=c)
        except sherd.ConfigError as error:
            return str(error)
    return ""


def test_a_random_optimizer_whose_parameters_depend_on_each_other_is_refused(ranks):
    for text in ranks(2).run(refused):
        assert "it is random, and its step of one parameter depends on the others" in text
