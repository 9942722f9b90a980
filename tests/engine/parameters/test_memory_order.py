"""Parameters whose dimensions lie in memory in another order than that of their numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sherd
from sherd import ConfigError, Diverged
from sherd.layout import Entry, ShardLayout
from sherd.layout.entry import memory_order
from tests.helpers.training import STRATEGIES, WORLD, all_same, connected, weights


@pytest.mark.pure
@given(
    st.lists(st.integers(1, 4), max_size=4).flatmap(
        lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))
    )
)
def test_flattened_and_shaped_are_the_reverse_of_each_other(drawn):
    shape, permutation = drawn
    tensor = torch.arange(torch.Size(shape).numel()).view(shape).permute(permutation)
    entry = Entry("w", tuple(tensor.shape), "int64", order=memory_order(tensor))
    flat = entry.flattened(tensor)
    assert flat.data_ptr() == tensor.data_ptr(), "no element was copied"
    assert torch.equal(flat, torch.arange(tensor.numel()))
    assert torch.equal(entry.shaped(flat), tensor)
    layout = ShardLayout.build([entry], 2)
    assert ShardLayout.from_json(layout.to_json()) == layout


@pytest.mark.pure
def test_what_has_gaps_or_common_elements_has_no_order():
    assert memory_order(torch.zeros(4, 6)[:, ::2]) is None
    assert memory_order(torch.zeros(4, 1).expand(4, 3)) is None
    with pytest.raises(ConfigError, match="write each dimension once"):
        Entry("w", (2, 3), order=(0, 0))


def images(format):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3)).double().to(memory_format=format)


def trained(c, strategy, format):
    model = images(format)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    model, optimizer = sherd.distribute(model, optimizer, strategy=strategy, comm=c)
    for step in range(3):
        x = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + c.rank))
        model(x).square().mean().backward()
        if step == 2:
            gradient = model[0].weight.grad
            assert gradient.stride() == model[0].weight.stride(), strategy
        optimizer.step()
        optimizer.zero_grad()
    assert model[0].weight.stride() == images(format)[0].weight.stride(), strategy
    state = optimizer.state_dict()["state"][0]["exp_avg"]
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(state, optimizer.state_dict()["state"][0]["exp_avg"])
    return {**weights(model), "state": state}


def formats():
    with connected() as c:
        found = {s: trained(c, s, torch.channels_last) for s in STRATEGIES}
        usual = trained(c, "zero2", torch.contiguous_format)
        with pytest.raises(Diverged, match=r"dimensions .* in memory"):
            sherd.distribute(images(torch.channels_last if c.rank else torch.contiguous_format), comm=c)
    all_same(found)
    return found["ddp"], usual


def test_channels_last_stays_so_and_trains_the_same_under_every_strategy(ranks):
    for last, usual in ranks(WORLD).run(formats):
        for name, tensor in usual.items():
            assert (last[name] - tensor).abs().max() <= 1e-9 * tensor.abs().max(), name
