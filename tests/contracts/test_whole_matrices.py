"""Contracts 2 and 3 where parameters are owned whole: bytes sent and bytes held are the formulas'."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

import sherd
from sherd import CommOptions, comm
from sherd.api.training import training_of
from sherd.layout.placement import padded
from sherd.testing import FakeCommunicator
from tests.contracts.test_large_worlds import gpt

ITEMSIZE = 4
SHARDED = ("zero1", "zero2", "zero3")


def networks(depth=3, width=96):
    """Matrices of two shapes, and of one size."""
    torch.manual_seed(0)
    pairs = [
        (nn.Linear(width, 2 * width, bias=False), nn.Tanh(), nn.Linear(2 * width, width, bias=False))
        for _ in range(depth)
    ]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


MAKERS = {"Muon": optim.Muon, "Adafactor": optim.Adafactor}


def train(model, optimizer, rank, steps=1):
    generator = torch.Generator().manual_seed(rank)
    gathering = getattr(training_of(model).engine.store, "gathering", None)
    for _ in range(steps):
        x = torch.randn(3, model[0].in_features, generator=generator, requires_grad=True)
        loss = model(x).square().mean()
        if gathering is not None:
            gathering.drop(gathering.gathered)  # so that backward gathers all of it again, as in a large model
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def measured(transport):
    """By optimizer and strategy: padded elements in all and of this rank, bytes sent in a step, and bytes held."""
    found = {}
    with comm.connect(CommOptions(transport=transport)) as c:
        for name, kind in MAKERS.items():
            for strategy in SHARDED:
                model = networks()
                optimizer = kind(model.parameters(), lr=0.01)
                sherd.distribute(model, optimizer, strategy=strategy, comm=c, clip_norm=0.1)
                train(model, optimizer, c.rank, 2)  # the first learns the order of buckets
                c.counters.reset()
                train(model, optimizer, c.rank)
                training = training_of(model)
                engine = training.engine
                total = c.counters.total()
                owned = sum(bucket.described.owned_numel(c.rank) for bucket in engine.buckets.buckets)
                shapes = [m.entry.shape for m in engine.buckets.parameters for s in m.segments() if s.owner == c.rank]
                held = {
                    "parameters": engine.store.bytes(),
                    "gradients": engine.gradient_bytes()["gradients"],
                    "state": training.state_bytes(),
                }
                found[name, strategy] = (engine.layout.padded_numel, engine.layout.numel, owned, shapes, total, held)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_a_step_sends_the_gradient_and_the_parameters_once(ranks, world):
    by_rank = ranks(world).run(measured, "c10d")
    for case in by_rank[0]:
        padding, numel, *_ = by_rank[0][case]
        assert padding < 1.05 * numel, "padding"
        gathers = 2 if case[1] == "zero3" else 1  # in forward and in backward, or after the update
        for found in by_rank:
            *_, owned, _, total, _ = found[case]
            # Everybody sends an owner its gradient, and an owner sends everybody its parameters.
            sent = (padding - owned) + gathers * (world - 1) * owned
            assert total.payload == ITEMSIZE * sent, case
            assert 0 < total.control < 0.2 * total.payload
        together = sum(found[case][4].payload for found in by_rank)
        assert together == (1 + gathers) * padding * ITEMSIZE * (world - 1), case


def state_of(name, shapes):
    """What torch's own keeps: a moment of Muon's, averages of rows and columns of Adafactor's and a counter."""
    if name == "Muon":
        return sum(ITEMSIZE * rows * columns for rows, columns in shapes)
    return sum(ITEMSIZE * (rows + columns + 1) for rows, columns in shapes)


@pytest.mark.parametrize("world", [2, 3])
def test_a_host_holds_what_the_formula_says(ranks, world):
    by_rank = ranks(world).run(measured, "host")
    for name, strategy in by_rank[0]:
        every = [found[name, strategy] for found in by_rank]
        padding, numel = every[0][:2]
        held = {kind: sum(found[5][kind] for found in every) for kind in every[0][5]}
        assert ITEMSIZE * numel <= held["parameters"] < 1.05 * ITEMSIZE * numel
        copies = world if strategy == "zero1" else 1
        assert ITEMSIZE * numel * copies <= held["gradients"] < 1.05 * ITEMSIZE * numel * copies
        for _, _, owned, shapes, total, its in every:
            assert its["state"] == state_of(name, shapes)
            assert strategy == "zero1" or its["gradients"] == ITEMSIZE * owned
            assert owned == sum(padded(rows * columns) for rows, columns in shapes)
            assert owned < 1.1 * padding / world, "six matrices of one size on two or three ranks"
            assert total.payload == ITEMSIZE * (padding - owned), "one copy of the parameters is not sent"


@pytest.mark.fake
@pytest.mark.parametrize("world", [8, 64])
def test_a_large_model_is_balanced(world):
    """A GPT of 7.5 billion parameters: its matrices by Muon, the rest by AdamW."""
    model = gpt()
    matrices = [p for block in model[2:-1] for p in block.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers = optim.Muon(matrices, lr=0.02), optim.AdamW(rest)
    strategy = sherd.ZeRO(stage=3, share_host_memory=False)
    sherd.distribute(model, *optimizers, strategy=strategy, comm=FakeCommunicator(1, world))
    engine = training_of(model).engine
    layout = engine.layout
    assert layout.padded_numel < 1.001 * layout.numel
    held = [layout.owner_bytes(owner)["float32"] / ITEMSIZE for owner in range(world)]
    assert max(held) < 1.2 * layout.padded_numel / world
    # Muon's work grows with the shorter side too; all have the same here, so that it is balanced as sizes are.
    work = [0] * world
    for each in engine.buckets.catalogue:
        if each.holder is not None:
            work[each.holder] += each.work
    assert max(work) < 1.25 * sum(work) / world
