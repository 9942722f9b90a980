"""Bits that do not depend on where a parameter lies.

Kernels choose their way by strides and alignment, each CPU in its own way. So random models, whose parameters lie in
memory in every way that torch allows, must have the same bits under every strategy and over every transport, and
parameters and gradients the same strides and alignment. `python -m tests.instruction_sets` repeats it as a weaker CPU.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sherd
from sherd.layout.entry import ALIGNMENT, Entry, dense_strides, memory_order
from tests.helpers.training import STRATEGIES, connected

PRIVATE = sherd.ZeRO(stage=2, share_host_memory=False)
GATHERED = sherd.ZeRO(stage=3, share_host_memory=False)
PLACES = {  # where ranks keep parameters, over each transport
    "host": (*STRATEGIES, PRIVATE, GATHERED),
    "c10d": ("ddp", "zero2", "zero3"),
}
STEPS = 2


def placed(choose, tensor):
    """The same values somewhere else in memory: behind an offset, with gaps, in another order of dimensions."""
    shape, order = tensor.shape, list(range(tensor.dim()))
    if choose.random() < 0.6:
        choose.shuffle(order)
    sizes = [shape[dimension] + (choose.randrange(4) if choose.random() < 0.2 else 0) for dimension in order]
    offset = choose.choice((0, 0, 1, 2, 3, 5, 8, 16))
    memory = torch.empty(torch.Size(sizes).numel() + offset, dtype=tensor.dtype)[offset:].view(sizes)
    for position, dimension in enumerate(order):
        memory = memory.narrow(position, 0, shape[dimension])
    memory = memory.permute(sorted(range(len(order)), key=order.__getitem__))
    if choose.random() < 0.2 and tensor.dim() == 4:
        memory = torch.empty_like(tensor, memory_format=torch.channels_last)
    return memory.copy_(tensor)


class Random(nn.Module):
    """A few layers over small images, with parameters at random places."""

    def __init__(self, seed):
        super().__init__()
        choose = random.Random(seed)
        torch.manual_seed(seed)
        size, layers = choose.choice((1, 2, 3, 4, 7, 8)), []
        self.channels = size
        self.dtype = choose.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16))
        for _ in range(choose.randrange(1, 4)):
            out, kernel = choose.choice((1, 2, 3, 5, 8, 16)), choose.choice((1, 1, 2, 3))
            groups = choose.choice([g for g in range(1, size + 1) if size % g == 0 and out % g == 0])
            kind = choose.choice((nn.Conv2d, nn.Conv2d, nn.ConvTranspose2d))
            layers += [kind(size, out, kernel, groups=groups, bias=choose.random() < 0.7), nn.Tanh()]
            if choose.random() < 0.3:
                layers.append(nn.GroupNorm(1, out))
            size = out
        self.images = nn.Sequential(*layers)
        self.line = nn.Conv1d(size, choose.choice((1, 2, 5)), choose.choice((1, 3)))
        self.head = nn.Linear(self.line.out_channels, choose.choice((1, 3, 4, 7)))
        self.to(self.dtype)
        for parameter in self.parameters():
            parameter.data = placed(choose, parameter.data)

    def forward(self, x):
        return self.head(self.line(self.images(x).flatten(2)).mean(2))

    def batch(self, rank, step):
        generator = torch.Generator().manual_seed(100 * step + rank)
        return torch.randn(1 + rank, self.channels, 7, 6, generator=generator).to(self.dtype)


def trained(c, seed, strategy):
    """Losses, gradients and weights of some steps; strides and alignment are checked on the way."""
    model = Random(seed)
    orders = {name: memory_order(parameter) for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = sherd.distribute(model, optimizer, strategy=strategy, comm=c)
    found = {}
    for step in range(STEPS):
        loss = model(model.batch(c.rank, step)).float().square().mean()
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        for name, parameter in model.named_parameters():
            for what, tensor in (("weight", parameter), ("gradient", parameter.grad)):
                expected = dense_strides(tensor.shape, orders[name])
                assert tensor.stride() == expected, (seed, strategy, what, name, tensor.stride(), expected)
                assert tensor.data_ptr() % ALIGNMENT == 0, (seed, strategy, what, name, tensor.data_ptr() % ALIGNMENT)
            found[f"gradient {step} {name}"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"weight {name}": parameter.detach().clone() for name, parameter in model.named_parameters()}


def agreeing(seeds):
    """Train each model in every place; the differences."""
    results: dict[int, dict[str, dict[str, torch.Tensor]]] = {seed: {} for seed in seeds}
    for transport, strategies in PLACES.items():
        with connected(transport) as c:
            for seed in seeds:
                for strategy in strategies:
                    results[seed][f"{strategy} over {transport}"] = trained(c, seed, strategy)
    wrong = []
    for seed, found in results.items():
        first, *others = found.items()
        for place, other in others:
            names = [name for name, tensor in first[1].items() if not torch.equal(tensor, other[name])]
            if names:
                wrong.append(f"model {seed}: {names[0]} has other bits under {place} than under {first[0]}")
    return wrong


def test_random_models_have_the_same_bits_everywhere(ranks):
    for wrong in ranks(2).run(agreeing, range(12)):
        assert not wrong, "\n".join(wrong)


@pytest.mark.fuzz
@pytest.mark.parametrize("first", range(100, 600, 50))
def test_more_random_models_have_the_same_bits_everywhere(ranks, first):
    for wrong in ranks(2).run(agreeing, range(first, first + 50), timeout=900):
        assert not wrong, "\n".join(wrong)


def odd_tensors(transport):
    with connected(transport) as c:
        for make in (
            lambda: torch.zeros(3, 4, 6)[:1, :1, :1],
            lambda: torch.zeros(9)[4:5].as_strided((1,), (7,)),
            lambda: torch.zeros(4, 3)[:, :1],
            lambda: torch.zeros(5, 2).t(),
        ):
            own = make()
            own += c.rank + torch.arange(own.numel()).view(own.shape)
            expected = sum(r + torch.arange(own.numel()).view(own.shape) for r in range(c.world))
            assert torch.equal(c.all_reduce(own).wait(), expected.float())
            assert torch.equal(c.all_gather(own).wait()[: own.shape[0]], own - c.rank)
            c.broadcast(own, root=1).wait()
            assert torch.equal(own, 1.0 + torch.arange(own.numel()).view(own.shape))


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_tensors_with_odd_strides_are_sent_as_they_are(ranks, transport):
    ranks(2).run(odd_tensors, transport)


FORMS = st.lists(st.integers(0, 4), max_size=5).flatmap(
    lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))), st.integers(0, 20))
)


@pytest.mark.pure
@given(FORMS)
def test_what_is_dense_keeps_its_strides_and_what_is_not_its_order(form):
    shape, permutation, offset = form
    numel = torch.Size(shape).numel()
    dense = torch.arange(offset, numel + offset).view(shape).permute(permutation)
    entry = Entry("w", tuple(dense.shape), "int64", order=memory_order(dense))
    if numel:
        sizes = [size > 1 for size in dense.shape]
        kept = [stride for stride, matters in zip(dense.stride(), sizes, strict=True) if matters]
        assert [stride for stride, matters in zip(entry.strides, sizes, strict=True) if matters] == kept
    settled = entry.settled(torch.arange(numel + 1 + offset)[1 + offset :].view(shape).permute(permutation))
    assert settled.stride() == entry.strides and settled.data_ptr() % ALIGNMENT == 0
    assert torch.equal(settled, dense + 1 if numel else dense)
    again = Entry("w", tuple(settled.shape), "int64", order=memory_order(settled))
    assert again.strides == entry.strides, "one form, however often it is settled"
    assert again.settled(settled) is settled


@pytest.mark.pure
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(5, 3, 1, 1), (8, 1, 3, 3), (1, 8, 3, 3), (1, 1, 1, 1), (4, 3, 3, 3)])
def test_a_memory_format_stays_what_it_is(shape, format):
    weight = torch.empty(shape).to(memory_format=format)
    assert Entry("w", shape, order=memory_order(weight)).strides == weight.stride()
