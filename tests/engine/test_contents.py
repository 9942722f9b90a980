"""What the ranks own, put together, is the whole model and its optimizer state, once, under every strategy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sherd
from sherd.api.training import training_of
from sherd.engine.contents import Role, pieces, scalars
from tests.helpers.training import STRATEGIES, batch, connected, train

pytestmark = pytest.mark.ranks


def unusual():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(15, 33), nn.BatchNorm1d(33), nn.Linear(33, 41), nn.Tanh(), nn.Linear(41, 5))
    model[2].weight.requires_grad_(False)
    return model


def optimizer_of(model):
    decay, rest = [], []
    for parameter in model.parameters():
        (decay if parameter.dim() > 1 else rest).append(parameter)
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


def contents(strategy):
    with connected() as c:
        model = unusual()
        model, optimizer = sherd.distribute(model, optimizer_of(model), strategy=strategy, comm=c)
        train(model, optimizer, [batch(c.rank, step) for step in range(3)])
        engine = training_of(model).engine
        owned = [(p.name, p.key, p.role, p.region, p.tensor.clone()) for p in pieces(engine)]
        kept = [(each.name, each.key, float(each.value)) for each in scalars(engine)]
        return owned, kept, model.state_dict(), optimizer.state_dict(), [name for name, _ in model.named_parameters()]


def whole(by_rank, sizes):
    """The pieces of all ranks put together, and how often each element was owned."""
    found = {}
    for owned, *_ in by_rank:
        for name, key, role, region, tensor in owned:
            values, times = found.setdefault(
                (name, key, role), (torch.zeros(sizes[name], dtype=tensor.dtype), torch.zeros(sizes[name]))
            )
            values[region.start : region.start + region.numel] = tensor
            times[region.start : region.start + region.numel] += 1
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_pieces_are_everything_once(ranks, strategy, world):
    by_rank = ranks(world).run(contents, strategy)
    _, _, model, optimizer, names = by_rank[0]
    found = whole(by_rank, {name: value.numel() for name, value in model.items()})
    assert all(bool((times == 1).all()) for _, times in found.values())
    for name, value in model.items():
        role = Role.PARAMETER if name in names else Role.BUFFER
        assert torch.equal(found.pop((name, "", role))[0], value.reshape(-1)), name
    # torch numbers parameters group by group: those with two dimensions first.
    order = sorted(names, key=lambda name: model[name].dim() < 2)
    counters = {(name, key): value for _, kept, *_ in by_rank for name, key, value in kept}
    assert sum(len(kept) for _, kept, *_ in by_rank) == len(counters)
    for number, state in optimizer["state"].items():
        for key, value in state.items():
            if value.dim():
                assert torch.equal(found.pop((order[number], key, Role.STATE))[0], value.reshape(-1)), (
                    order[number],
                    key,
                )
            else:
                assert counters.pop((order[number], key)) == float(value)
    assert not found
    assert not counters
