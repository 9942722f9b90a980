"""16-bit training, and what it should come to by plain torch."""

from __future__ import annotations

import torch
from torch import nn

import sherd

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
BACKWARDS = 2  # in a window, where gradients accumulate
STEPS = 4


class Net(nn.Module):
    """Odd shapes, and a norm, which stays in fp32."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second, self.last = (
            nn.Linear(15, 7),
            nn.LayerNorm(7),
            nn.Linear(7, 97),
            nn.Linear(97, 3),
        )

    def forward(self, x):
        return self.last(torch.tanh(self.second(self.norm(self.first(x)))))


def network():
    torch.manual_seed(0)
    return Net()


def loss_of(model, rank, number):
    x = torch.randn(4, 15, generator=torch.Generator().manual_seed(100 * number + rank))
    return model(x).square().mean()


def masters_of(model):
    with sherd.full_parameters(model, masters=True):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def recorded(c, strategy, make=torch.optim.AdamW, steps=STEPS, **options):
    """The contributions of this rank, backward by backward, and the masters before and after each step."""
    model = network()
    optimizer = make(model.parameters(), lr=1e-2)
    model, optimizer = sherd.distribute(model, optimizer, strategy=strategy, comm=c, **options)
    contributions = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, name=name: contributions[-1].update({name: g.detach().clone()}))
    masters = [masters_of(model)]
    backwards = options.get("accumulate", 1)
    for number in range(steps * backwards):
        contributions.append({})
        loss_of(model, c.rank, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % backwards == backwards - 1:
            masters.append(masters_of(model))
    return contributions, masters, {name: p.detach().clone() for name, p in model.named_parameters()}


def summed(parts, wire, group):
    """Contributions of the ranks, as they travel, added in fp32 in the order of the summation tree."""
    total = None
    for start in range(0, len(parts), group):
        partial = parts[start].to(wire).float()
        for part in parts[start + 1 : start + group]:
            partial = partial + part.to(wire).float()
        if group < len(parts):
            partial = partial.to(wire).float()
        total = partial if total is None else total + partial
    return total / len(parts)


def expected(by_rank, wire, kept=torch.float32, at="owner", backwards=1, group=None, make=torch.optim.AdamW, scale=1.0):
    """The masters after each step, by plain torch on whole tensors, from what the ranks contributed, times `scale`."""
    contributions = [found[0] for found in by_rank]
    group = group or len(by_rank)
    masters = {name: nn.Parameter(value.clone()) for name, value in by_rank[0][1][0].items()}
    optimizer = make(masters.values(), lr=1e-2)
    after = []
    for first in range(0, len(contributions[0]), backwards):
        for name, master in masters.items():
            mine = wire.get(contributions[0][first][name].dtype)
            its = [[rank[first + k][name] for k in range(backwards)] for rank in contributions]
            if at == "rank":
                whole = [sum(g.float() / backwards for g in row) for row in its]
                total = (summed([w.to(kept) for w in whole], mine, group) / scale).to(kept)
            else:
                total = torch.zeros_like(master, dtype=kept)
                for k in range(backwards):
                    total += (summed([row[k].float() / backwards for row in its], mine, group) / scale).to(kept)
            master.grad = total.float()
        optimizer.step()
        after.append({name: master.detach().clone() for name, master in masters.items()})
    return after
