"""Random graphs of modules, gone through in another way in every step: all strategies train the same bits.

A graph is drawn from a seed, and so is the *way* of each step: a list of instructions, each the name of a method of
`Walk` and the modules or parameters that it takes. All ranks go the same way, on data of their own.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sherd
from tests.helpers.training import adamw, connected, sgd

WIDTH = 12
GATHERED = sherd.ZeRO(stage=3, share_host_memory=False)


# -------------------------------------------------------------------- graphs


class Recurrent(nn.Module):
    """Several parameters in one node of autograd's graph."""

    def __init__(self):
        super().__init__()
        self.layers = nn.GRU(WIDTH, WIDTH, num_layers=2)

    def forward(self, x):
        return self.layers(x)[0]


class Bare(nn.Module):
    """Parameters outside any layer: a scalar, one that is never used, and one of which views are taken."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.never = nn.Parameter(torch.ones(300))
        self.table = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / WIDTH)

    def forward(self, x):
        upper, lower = self.table.split(WIDTH)
        return self.scale * (x @ upper.t() + x * lower[3])


def linear():
    return nn.Linear(WIDTH, WIDTH)


def deep():
    return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, WIDTH, bias=False))


def normalised():
    return nn.LayerNorm(WIDTH)


KINDS = (linear, linear, deep, normalised, Recurrent, Bare)


class Graph(nn.Module):
    """Modules that may follow each other in any order, some of them in two places, some with the weight of another."""

    def __init__(self, draw):
        super().__init__()
        torch.manual_seed(draw.randrange(1 << 30))
        modules = [draw.choice(KINDS)() for _ in range(draw.randrange(3, 10))]
        layers = [module for module in (linear(), *modules) if isinstance(module, nn.Linear)]
        tied = linear()
        tied.weight = draw.choice(layers).weight
        pair = nn.Sequential(draw.choice(modules), tied)
        self.nodes = nn.ModuleList([layers[0], *modules, tied, pair])
        self.weights = [layer.weight for layer in layers]  # a list: they are the layers' own


# -------------------------------------------------------------------- ways


class Walk:
    """One way through a graph; `loss` is where it ends."""

    def __init__(self, graph, x):
        self._graph = graph
        self._x = x
        self._penalty = 0.0

    def through(self, node):
        self._x = torch.tanh(self._x + self._graph.nodes[node](self._x))

    def checkpointed(self, reentrant, nodes):
        def part(x):
            for node in nodes:
                x = torch.tanh(x + self._graph.nodes[node](x))
            return x

        self._x = checkpoint(part, self._x, use_reentrant=reentrant)

    def by_weight(self, number):
        """The weight of a layer without the layer."""
        self._x = torch.tanh(self._x @ self._graph.weights[number % len(self._graph.weights)])

    def penalised(self, number):
        self._penalty = self._penalty + self._graph.weights[number % len(self._graph.weights)].square().mean()

    def only_looked_at(self, node):
        with torch.no_grad():
            self._graph.nodes[node](self._x)

    @property
    def loss(self):
        return self._x.square().mean() + self._penalty


def drawn_way(draw, nodes):
    """Instructions for one step."""
    way = [("through", draw.randrange(nodes))]
    for _ in range(draw.randrange(8)):
        name = draw.choice(["through"] * 5 + ["checkpointed"] * 2 + ["by_weight", "penalised", "only_looked_at"])
        if name == "checkpointed":
            part = [draw.randrange(nodes) for _ in range(draw.randrange(1, 4))]
            way.append((name, draw.random() < 0.5, part))
        else:
            way.append((name, draw.randrange(nodes)))
    return way


def walk(graph, way, number, rank):
    generator = torch.Generator().manual_seed(1000 * number + rank)
    walk = Walk(graph, torch.randn(3, 2, WIDTH, generator=generator).requires_grad_())
    for name, *arguments in way:
        getattr(walk, name)(*arguments)
    return walk.loss


# -------------------------------------------------------------------- runs


def trained(c, strategy, seed, steps):
    """Losses of the steps, their ways, and the weights in the end."""
    draw = random.Random(seed)
    graph = Graph(draw)
    optimizer = draw.choice((adamw, sgd))(graph)
    bucket_bytes = draw.choice((1024, 2048, 8192))
    options = {
        "bucket_bytes": None if seed % 4 == 3 else bucket_bytes,  # then gradients are taken when a backward has ended
        "clip_norm": draw.choice((None, 0.1)),
        "accumulate_at": draw.choice(("rank", "owner")),
    }
    sherd.distribute(graph, optimizer, strategy=strategy, comm=c, **options)
    losses, ways = [], []
    for number in range(steps):
        for part in range(draw.choice((1, 1, 1, 2))):  # backwards
            ways.append(drawn_way(draw, len(graph.nodes)))
            loss = walk(graph, ways[-1], 2 * number + part, c.rank)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=draw.random() < 0.8)
    return losses, ways, {name: parameter.detach().clone() for name, parameter in graph.named_parameters()}


def compared(seed, steps, transport="host"):
    with connected(transport) as c:
        expected, ways, right = trained(c, "zero2", seed, steps)
        for strategy in ("ddp", GATHERED):
            losses, _, found = trained(c, strategy, seed, steps)
            told = f"seed {seed}, {strategy}"
            for number, (loss, other) in enumerate(zip(losses, expected, strict=True)):
                assert loss == other, f"{told}: backward {number} has another loss; before it went {ways[:number][-2:]}"
            wrong = [name for name in right if not torch.equal(found[name], right[name])]
            assert not wrong, f"{told}: in the end {wrong} are different; the last ways were {ways[-2:]}"
    return len(set(expected))


@pytest.mark.parametrize("seed", [0, 4, 8])
def test_random_graphs_train_the_same_bits(ranks, seed):
    assert min(ranks(2).run(compared, seed, 12)) >= 12  # something was trained


@pytest.mark.fuzz
@pytest.mark.parametrize("transport", ["host", "c10d"])
@pytest.mark.parametrize("seed", range(100, 115))
def test_many_steps_of_random_graphs(ranks, seed, transport):
    ranks(2).run(compared, seed, 200, transport, timeout=600)
