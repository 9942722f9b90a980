"""Checkpointed modules are computed again in a backward, with the dtypes of the forward; and torch.compile."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sherd.engine.modules.casting import Autocasting
from tests.engine.modules.casting.models import BF16, FP32, Block, cast_model

pytestmark = pytest.mark.pure


class Checkpointed(nn.Module):
    """Blocks that are checkpointed: `reentrant`, or None for not at all."""

    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.reentrant, self.checkpointed = nn.Linear(8, 8), reentrant, reentrant is not None
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(bounded, block, x, use_reentrant=self.reentrant) if self.checkpointed else bounded(block, x)
        return x


def bounded(block, x):
    """Keeps what a block returned for the backward, in the dtype that it had."""
    return block(x).tanh()


def autocast(model, dtype=BF16):
    Autocasting([model], dtype).install()
    return model


def gradients(model, run, x):
    model.zero_grad()
    run(model, x).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def as_torch_does(values):
    return {name: (value.dtype, value.flatten().tolist()) for name, value in values.items()}


@pytest.mark.parametrize("prepare", [cast_model, autocast])
@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_the_model(prepare, reentrant):
    x = torch.randn(2, 5, 8)
    plain, again = prepare(Checkpointed()), prepare(Checkpointed(reentrant))
    heard = []
    again.blocks[1].register_forward_pre_hook(lambda module, args: heard.append(args[0].dtype))
    expected = gradients(plain, lambda model, x: model(x), x)
    assert as_torch_does(gradients(again, lambda model, x: model(x), x)) == as_torch_does(expected)
    assert heard == [BF16, BF16], "it ran twice"


@pytest.mark.parametrize("prepare", [cast_model, autocast])
@pytest.mark.parametrize("reentrant", [True, False])
def test_around_the_model(prepare, reentrant):
    model, x, heard = prepare(Checkpointed()), torch.randn(2, 5, 8, requires_grad=True), []
    model.register_forward_hook(lambda module, args, output: heard.append(output.dtype))
    expected = gradients(model, lambda model, x: model(x).exp(), x)
    found = gradients(model, lambda model, x: checkpoint(lambda x: model(x).exp(), x, use_reentrant=reentrant), x)
    assert as_torch_does(found) == as_torch_does(expected) and heard == [FP32] * 3


class Between(nn.Module):
    """A layer that is checkpointed in the forward, in a function, between two others."""

    def __init__(self, reentrant=None, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.reentrant, self.wide = reentrant, wide

    def again(self, x):
        return self.layer(x).tanh() * 2

    def forward(self, x):
        x = self.first(x)
        with torch.autocast("cpu", enabled=False) if self.wide else contextlib.nullcontext():
            x = x.float() if self.wide else x
            y = self.again(x) if self.reentrant is None else checkpoint(self.again, x, use_reentrant=self.reentrant)
        return self.last(y)


def alone(model, x):
    return model(x)


def probed(model, x):
    y = model(x)
    with torch.no_grad():
        model.layer(x)
    return y


def siamese(model, x):
    return model(x) + model.layer(x).exp()


def from_outside_before(model, x):
    return model.layer(x).exp() + model(x)


def both_checkpointed(model, x):
    return model(x) + checkpoint(lambda x: model.layer(x).exp(), x, use_reentrant=model.reentrant or False)


def two_graphs(model, x):
    first, again = model(x), siamese(model, x + 1)
    model.layer(x)
    second = model(x + 2)
    return first + again + second


@pytest.mark.parametrize("prepare", [cast_model, autocast])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("run", [alone, probed, siamese, from_outside_before, both_checkpointed, two_graphs])
def test_a_layer_that_is_entered_from_outside_too(prepare, reentrant, run):
    """It is recomputed as it was computed, wherever other calls of it came from."""
    x = torch.randn(5, 8, requires_grad=True)
    expected = gradients(prepare(Between()), run, x)
    assert as_torch_does(gradients(prepare(Between(reentrant)), run, x)) == as_torch_does(expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_where_the_model_has_switched_autocast_off(reentrant):
    x = torch.randn(5, 8, requires_grad=True)
    for run in (alone, probed, siamese):
        expected = gradients(autocast(Between(wide=True)), run, x)
        found = gradients(autocast(Between(reentrant, wide=True)), run, x)
        assert as_torch_does(found) == as_torch_does(expected)


@pytest.mark.parametrize("prepare", [cast_model, autocast])
def test_two_graphs_in_any_order(prepare):
    model, x = prepare(Between(False)), torch.randn(5, 8)
    plain = prepare(Between())
    for each in (model, plain):
        first, second = each(x), each.layer(x).exp()
        third = each(x + 1)
        for loss in (third, first, second):
            loss.square().mean().backward()
    found, expected = ({name: p.grad for name, p in each.named_parameters()} for each in (model, plain))
    assert as_torch_does(found) == as_torch_does(expected)


@pytest.mark.parametrize("prepare", [cast_model, autocast])
def test_autograd_grad(prepare):
    model, x = prepare(Checkpointed(False)), torch.randn(2, 5, 8)
    found = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    expected = gradients(model, lambda model, x: model(x), x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected.values(), strict=True))


class Small(nn.Module):
    """What is quick to compile; it notes what its part returns."""

    def __init__(self):
        super().__init__()
        self.first, self.part = nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))

    def forward(self, x):
        y = self.part(self.first(x))
        self.inside = y.dtype
        return y


@pytest.mark.parametrize("prepare", [cast_model, autocast])
@pytest.mark.parametrize("what", ["model", "call", "part"])
def test_compiled(prepare, what):
    """As a whole and in part: only what is outermost returns fp32."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, x = prepare(Small()), torch.randn(2, 4)
    expected = gradients(copy.deepcopy(model), lambda model, x: model(x), x)
    run = model
    if what == "model":
        run = torch.compile(model, backend="eager", fullgraph=True)
    elif what == "call":
        model.compile(backend="eager")
    else:
        model.part.compile(backend="eager")
    for _ in range(2):
        assert as_torch_does(gradients(model, lambda _, x: run(x), x)) == as_torch_does(expected)
        assert run(x).dtype is FP32 and model.inside is BF16
    assert model.part(x).dtype is model.first(x).dtype is FP32 and not torch.is_autocast_enabled("cpu")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
