"""Checkpointed modules are computed again in a backward, with the dtypes of the forward; and torch.compile."""

from __future__ import annotations

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
        run = torch.compile(model, backend="eager", fullgraph=prepare is cast_model)
    elif what == "call":
        model.compile(backend="eager")
    else:
        model.part.compile(backend="eager")
    for _ in range(2):
        assert as_torch_does(gradients(model, lambda _, x: run(x), x)) == as_torch_does(expected)
        assert run(x).dtype is FP32 and model.inside is BF16
    assert model.part(x).dtype is model.first(x).dtype is FP32 and not torch.is_autocast_enabled("cpu")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
