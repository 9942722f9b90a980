"""Bytes sent and bytes held by 16-bit training are the formulas'."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import sherd
from sherd.api.training import training_of
from sherd.engine.optimizer import runs
from sherd.engine.parameters.gathered.gathering import WINDOW
from sherd.testing import FakeCommunicator
from tests.contracts.test_large_worlds import gpt
from tests.helpers.training import STRATEGIES, connected

WIDTH = 384
GRADIENT, PARAMETERS = 0, 1
SENT = {  # bytes per element of what travels: gradients, and parameters each time they are gathered; times (N - 1) / N
    "bf16": ({"precision": "bf16"}, 2, {"ddp": 4, "zero1": 2, "zero2": 2, "zero3": 2}),
    "bf16 sums": ({"precision": "bf16", "grad_dtype": "bf16"}, 2, {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2}),
    "fp32 wire": ({"precision": "bf16", "wire_dtype": "fp32"}, 4, {"ddp": 4, "zero1": 2, "zero2": 2, "zero3": 2}),
    "fp16 wire": ({"wire_dtype": "fp16"}, 2, dict.fromkeys(STRATEGIES, 4)),
    "bf16 wire": ({"wire_dtype": "bf16"}, 2, dict.fromkeys(STRATEGIES, 4)),
}


def stack(depth=8):
    """Equal layers, without biases: a bucket each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))


def train(model, optimizer, rank, number):
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))
    model(x.requires_grad_()).square().mean().backward()  # backward uses every layer
    optimizer.step()
    optimizer.zero_grad()


def distributed(c, strategy, bytes_per_layer=4, **options):
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    bucket_bytes = bytes_per_layer * WIDTH * WIDTH
    return sherd.distribute(model, optimizer, strategy=strategy, comm=c, bucket_bytes=bucket_bytes, **options)


def counted(cases):
    """Payload of a step, elements of the model and of what zero3 need not gather a second time, by case."""
    found = {}
    with connected("c10d") as c:
        for name, strategy in cases:
            options = SENT[name][0]
            model, optimizer = distributed(c, strategy, 2 if "precision" in options else 4, **options)
            train(model, optimizer, c.rank, 0)  # the first step learns the order of buckets
            c.counters.reset()
            train(model, optimizer, c.rank, 1)
            engine = training_of(model).engine
            kept = 0 if engine.store.whole else WINDOW * engine.layout.buckets[0].numel
            found[name, strategy] = c.counters.total().payload, engine.layout.padded_numel, kept
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_a_step_sends_gradients_and_parameters_in_their_dtypes(ranks, world):
    cases = list(itertools.product(SENT, STRATEGIES))
    for found in ranks(world).run(counted, cases):
        for (name, strategy), (payload, numel, kept) in found.items():
            _, gradient, by_strategy = SENT[name]
            back = by_strategy[strategy]
            times = 2 if strategy == "zero3" else 1
            expected = gradient * numel + back * (times * numel - kept)
            assert payload * world == expected * (world - 1), (name, strategy, payload * world / numel / (world - 1))


# ---------------------------------------------------------------- memory, without machines

HELD = {  # bytes for P parameters on N ranks with a host each: ZeRO's own formulas, with masters and two moments
    ("ddp", None): lambda p, n: 18 * p,
    ("zero1", None): lambda p, n: 6 * p + 12 * p / n,
    ("zero2", None): lambda p, n: 2 * p + 16 * p / n,
    ("zero3", None): lambda p, n: 18 * p / n,
    ("ddp", "bf16"): lambda p, n: 16 * p,
    ("zero1", "bf16"): lambda p, n: 4 * p + 12 * p / n,
    ("zero2", "bf16"): lambda p, n: 2 * p + 14 * p / n,
    ("zero3", "bf16"): lambda p, n: 16 * p / n,
}
PUBLISHED = {"ddp": 120e9, "zero1": 31.4e9, "zero2": 16.6e9, "zero3": 1.88e9}
"""Of 7.5 billion parameters on 64 ranks."""


@pytest.fixture
def runs_in_one_chunk(monkeypatch):
    """Chunks that fit into a cache have the same bytes, but there are many thousands of them."""
    cut = runs._cut
    monkeypatch.setattr(runs, "_cut", lambda run, flats, chunk_numel: cut(run, flats, 1 << 40))


def state_bytes(model, strategy, rank, world, grad_dtype=None):
    """Bytes of parameters, masters, gradients and optimizer state of a rank, after a step."""
    optimizer = torch.optim.AdamW(model.parameters())
    stage = int(strategy[-1]) if strategy != "ddp" else 0
    how = sherd.ZeRO(stage=stage, share_host_memory=False) if stage else "ddp"
    options = {"precision": "bf16", "keep_fp32": [], "grad_dtype": grad_dtype}
    sherd.distribute(model, optimizer, strategy=how, comm=FakeCommunicator(rank, world), **options)
    training = training_of(model)
    engine = training.engine
    for member in engine.buckets.parameters:
        member.used = True
    engine.summed.access.show(engine.buckets.buckets)
    with engine.updating(training.gradient(optimizer)):
        training.shard(optimizer).step()
    held = training.memory()
    return sum(held[kind] for kind in ("parameters", "gradients", "optimizer state", "masters"))


@pytest.mark.fake
@pytest.mark.parametrize(("strategy", "grad_dtype"), HELD)
def test_a_rank_of_64_holds_what_the_formula_says(runs_in_one_chunk, strategy, grad_dtype):
    numel = sum(parameter.numel() for parameter in gpt().parameters())
    for rank in (0, 63):
        found = state_bytes(gpt(), strategy, rank, 64, grad_dtype)
        expected = HELD[strategy, grad_dtype](numel, 64)
        assert abs(found - expected) <= 0.01 * expected, (found / 1e9, expected / 1e9)
        if grad_dtype is not None:
            published = PUBLISHED[strategy] * numel / 7.5e9
            assert abs(found - published) <= 0.01 * published, (found / 1e9, published / 1e9)


@pytest.mark.fake
def test_a_trillion_parameters_on_1024_ranks_take_15_6_gb_each(runs_in_one_chunk):
    numel = sum(parameter.numel() for parameter in trillion().parameters())
    assert 0.99e12 < numel < 1.01e12
    found = state_bytes(trillion(), "zero3", 511, 1024, "bf16")
    assert abs(found - 15.6e9 * numel / 1e12) <= 0.01 * 15.6e9, found / 1e9


def trillion():
    return gpt(width=25_600, layers=127)
