"""Small models, batches and loops for tests of training."""

from __future__ import annotations

import itertools

import torch
from torch import nn

import sherd
from sherd import CommOptions, comm

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
SHARDED = STRATEGIES[1:]
WORLD = 2
K = 3  # backwards in a window
EVERYWHERE = tuple(itertools.product(STRATEGIES, ("rank", "owner")))  # where they are added up


def connected(transport="host", timeout=40.0):
    """A communicator for several cases in one run."""
    return comm.connect(CommOptions(transport=transport, timeout=timeout))


class Failing(torch.autograd.Function):
    """Its backward fails."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no way back")


def network(seed=0, dtype=torch.float32):
    """Shapes that divide by nothing."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(15, 7), nn.Tanh(), nn.Linear(7, 5)).to(dtype)


def double():
    return network(dtype=torch.float64)


def batch(rank, step=0, rows=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return tuple(torch.randn(rows, n, generator=generator, dtype=torch.float64).to(dtype) for n in (15, 5))


def whole_batch(step=0, rows=3, dtype=torch.float32):
    """What all ranks have together."""
    parts = [batch(rank, step, rows, dtype) for rank in range(WORLD)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def loss_of(model, data):
    x, y = data
    return (model(x) - y).square().mean()


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, **options})


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, "weight_decay": 0.1, **options})


def distributed(c, strategy, make=network, optimizer=sgd, **options):
    model = make()
    return sherd.distribute(model, optimizer(model), strategy=strategy, comm=c, **options)


def train(model, optimizer, batches):
    """The plain loop."""
    for data in batches:
        loss_of(model, data).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def gradients(model):
    """Copies of `p.grad`; None where there is none."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: None if gradient is None else gradient.clone() for name, gradient in found.items()}


def same(found, expected, what=""):
    """Two dicts of tensors have the same bits."""
    assert found.keys() == expected.keys(), what
    for name, tensor in expected.items():
        if tensor is None or found[name] is None:
            assert found[name] is tensor, (what, name, found[name], tensor)
            continue
        assert found[name].dtype == tensor.dtype, (what, name)
        assert torch.equal(found[name], tensor), (what, name, (found[name] - tensor).abs().max())


def all_same(by_strategy):
    """Every strategy has the bits of the first."""
    first, *others = by_strategy
    for other in others:
        same(by_strategy[other], by_strategy[first], (first, other))


def close(found, expected, what="", rtol=1e-9):
    """Two dicts of tensors agree to `rtol` of the largest element."""
    assert found.keys() == expected.keys(), what
    for name, tensor in expected.items():
        assert (found[name] is None) == (tensor is None), (what, name)
        if tensor is not None:
            error = (found[name] - tensor).abs().max()
            assert error <= rtol * tensor.abs().max(), (what, name, error)


def differ(found, expected):
    """Whether some bits differ, for the tests of tests."""
    return any(not torch.equal(found[name], expected[name]) for name in expected)
