"""Optimizers that communicate by themselves, as some do once torch.distributed is initialised."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import optim
from torch.distributed import all_reduce

import sherd
from sherd import ConfigError
from tests.helpers.training import SHARDED, batch, connected, differ, network, train, weights


class Averaging(optim.SGD):
    """Averages gradients by a name of its own for the collective."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if dist.is_initialized():
                    all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
                parameter -= group["lr"] * parameter.grad


class Dividing(optim.SGD):
    """Has each rank step its part of the rows, which must come out even."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                rows = parameter.shape[0] // dist.get_world_size()
                assert rows * dist.get_world_size() == parameter.shape[0], "cannot be divided"
                mine = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
                dist.all_gather_single(parameter, (parameter - group["lr"] * parameter.grad)[mine].contiguous())


class Functional(optim.SGD):
    @torch.no_grad()
    def step(self):
        from torch.distributed._functional_collectives import all_reduce as functional

        for parameter in self.param_groups[0]["params"]:
            parameter -= functional(parameter.grad, "sum", dist.group.WORLD)


class Counting(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def communicating():
    import torch.distributed._functional_collectives

    with connected() as c:
        handler = Counting()
        logging.getLogger("sherd").addHandler(handler)
        for kind, name in ((Averaging, "all_reduce"), (Dividing, "all_gather_single"), (Functional, "all_reduce")):
            for strategy in SHARDED:
                model = network()
                if c.rank == 0:  # that something was sent would show: the other rank does not take part
                    with pytest.raises(
                        ConfigError, match=rf"{kind.__name__} cannot be sharded: its step\(\) communicates on its own"
                    ) as caught:
                        check(kind(model.parameters(), lr=0.1), strategy, c)
                    assert f"with {name} of torch.distributed" in str(caught.value)
                    assert "use its single-process variant" in str(caught.value)
        assert not handler.texts
        everywhere = torch.ones(3)
        dist.all_reduce(everywhere)  # the collectives are what they were
        assert everywhere.tolist() == [2, 2, 2]
        model = network()
        before, optimizer = weights(model), Averaging(model.parameters(), lr=0.1)
        sherd.distribute(model, optimizer, strategy="ddp", comm=c)
        train(model, optimizer, [batch(c.rank, step) for step in range(2)])
        assert differ(weights(model), before)
        said = [text for text in handler.texts if "Averaging communicates on its own" in text]
        assert len(said) == (1 if c.rank == 0 else 0)
        logging.getLogger("sherd").removeHandler(handler)


def check(optimizer, strategy, c):
    """What `distribute` asks, without what is collective about it."""
    from sherd.engine.assembly import check_optimizer
    from sherd.strategies import resolve

    chosen = resolve(strategy)
    check_optimizer(optimizer, chosen.policy(c, torch.device("cpu")), chosen.name)


def test_an_optimizer_that_communicates_is_named_and_nothing_is_sent(ranks):
    ranks(2).run(communicating)
