"""Large worlds without machines: what one rank of 64 or of 1,024 would allocate for a GPT of 7.5 billion parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sherd
from sherd.api.training import training_of
from sherd.engine.optimizer import runs
from sherd.testing import FakeCommunicator

pytestmark = pytest.mark.fake


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


def gpt(width=4096, layers=36, vocabulary=50_304, length=2048):
    with torch.device("meta"):
        blocks = [Block(width) for _ in range(layers)]
        tables = [nn.Embedding(vocabulary, width), nn.Embedding(length, width)]
        return nn.ModuleList([*tables, *blocks, nn.LayerNorm(width)])


def state_bytes(strategy, rank, world):
    """Bytes of parameters, gradients and optimizer state of a rank, after a step."""
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    sherd.distribute(model, optimizer, strategy=strategy, comm=FakeCommunicator(rank, world))
    training = training_of(model)
    engine = training.engine
    for member in engine.buckets.parameters:
        member.used = True
    engine.summed.access.show(engine.buckets.buckets)
    with engine.updating(training.gradient(optimizer)):
        training.shard(optimizer).step()
    return engine.store.bytes() + engine.gradient_bytes()["gradients"] + training.state_bytes()


def zero(stage, **options):
    return sherd.ZeRO(stage=stage, share_host_memory=False, **options)


EXPECTED = {
    "ddp": (sherd.DDP(), lambda p, n: 16 * p),
    "zero1": (zero(1), lambda p, n: 8 * p + 8 * p / n),
    "zero2": (zero(2), lambda p, n: 4 * p + 12 * p / n),
    "zero3": (zero(3), lambda p, n: 16 * p / n),
    "zero3 in groups of 8": (zero(3, shard_over=8), lambda p, n: 4 * p / 8 + 12 * p / n),
}


@pytest.fixture
def runs_in_one_chunk(monkeypatch):
    """Chunks that fit into a cache have the same bytes, but 7.5 billion parameters have 29,000 of them."""
    cut = runs._cut
    monkeypatch.setattr(runs, "_cut", lambda run, flats, chunk_numel: cut(run, flats, 1 << 40))


@pytest.mark.parametrize("world", [64, 1024])
@pytest.mark.parametrize("name", EXPECTED)
def test_bytes_of_state_follow_the_formula_at_any_size(runs_in_one_chunk, name, world):
    strategy, formula = EXPECTED[name]
    numel = sum(parameter.numel() for parameter in gpt().parameters())
    assert 7.4e9 < numel < 7.6e9
    for rank in (0, world // 2, world - 1):
        found, expected = state_bytes(strategy, rank, world), formula(numel, world)
        assert abs(found - expected) <= 0.02 * expected, (rank, found / 1e9, expected / 1e9)
