"""LARS and LAMB written down plainly, over whole tensors, and a model whose layers are cut by every world."""

from __future__ import annotations

import torch
from torch import nn

from sherd.optim import LAMB, LARS
from tests.helpers.training import weights as every_weight

WORLD = 3
STEPS = 4


class Net(nn.Module):
    """Layers of odd sizes, one of 8 blocks; one that some steps do not use; parameters of no dimension and of none."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(15, 37)
        self.middle = nn.Linear(37, 51)
        self.extra = nn.Linear(51, 23)
        self.conv = nn.Conv2d(3, 7, 3, padding=1)
        self.norm = nn.LayerNorm(51)
        self.after = nn.Linear(51, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.zero = nn.Parameter(torch.zeros(5, 60))
        self.to(dtype)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, x, extra=True):
        image = self.conv(x.view(-1, 3, 1, 5)).mean((1, 2, 3)).unsqueeze(1)
        hidden = self.norm(torch.tanh(self.middle(torch.tanh(self.before(x) + image))))
        if extra:
            hidden = hidden + self.extra(hidden).mean(1, keepdim=True)
        return torch.tanh(self.after(hidden) * self.scale) + self.nothing.sum() + (self.zero * 0.1).mean(1)


def batch(rank, step, dtype):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return tuple(torch.randn(4, n, generator=generator, dtype=torch.float64).to(dtype) for n in (15, 5))


def loss_of(model, rank, step, dtype):
    x, y = batch(rank, step, dtype)
    return (model(x, extra=step // 2 % 2 == 0) - y).square().mean()


def weights(model):
    """Copies of what has elements."""
    return {name: value for name, value in every_weight(model).items() if value.numel()}


def groups(model):
    """Two groups that differ: the second has the layers whose names come last, and adapts them whatever their form."""
    named = list(model.named_parameters())
    some = [p for name, p in named if not name.startswith(("after", "norm", "scale"))]
    others = [p for name, p in named if name.startswith(("after", "norm", "scale"))]
    return [{"params": some}, {"params": others, "lr": 0.03, "weight_decay": 0.0, "adapt": True}]


CASES = {
    "lamb": (LAMB, {"lr": 0.02, "weight_decay": 0.1}),
    "lars": (LARS, {"lr": 0.5, "weight_decay": 0.01, "trust_coefficient": 0.1, "nesterov": True}),
}


def build(case, model):
    kind, options = CASES[case]
    return kind(groups(model), **options)


class Plain:
    """Either of them, without anything that is cut, kept or added in a certain order."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.state = {}

    @torch.no_grad()
    def step(self):
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    grad = -p.grad if group["maximize"] else p.grad
                    rule = self.lamb if isinstance(self.optimizer, LAMB) else self.lars
                    rule(p, grad, group, group["adapt"] if group["adapt"] is not None else p.dim() > 1)

    def lamb(self, p, grad, group, adapts):
        t, m, v = self.state.get(p, (0, torch.zeros_like(p), torch.zeros_like(p)))
        b1, b2 = group["betas"]
        t, m, v = t + 1, b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad**2
        self.state[p] = t, m, v
        r = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + group["eps"]) + group["weight_decay"] * p
        ratio = p.norm() / r.norm() if adapts and p.norm() > 0 and r.norm() > 0 else 1.0
        p.copy_(p - group["lr"] * ratio * r)

    def lars(self, p, grad, group, adapts):
        decay, momentum = group["weight_decay"], group["momentum"]
        ratio = 1.0
        if adapts and p.norm() > 0 and grad.norm() > 0:
            ratio = group["trust_coefficient"] * p.norm() / (grad.norm() + decay * p.norm() + group["eps"])
        update = ratio * (grad + decay * p)
        buffer = self.state[p] = momentum * self.state.get(p, 0.0) + update
        p.copy_(p - group["lr"] * (update + momentum * buffer if group["nesterov"] else buffer))


def dense(case, world=WORLD, steps=STEPS, accumulate=1, clip=None, dtype=torch.float64):
    """One process with the batches of all ranks; real steps are every `accumulate`."""
    model = Net(dtype)
    optimizer = build(case, model)
    plain = Plain(optimizer)
    for step in range(steps * accumulate):
        for rank in range(world):
            (loss_of(model, rank, step, dtype) / (world * accumulate)).backward()
        if (step + 1) % accumulate == 0:
            if clip is not None:
                assert nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
            plain.step()
            optimizer.zero_grad()
    return model
