"""A model with two experts, of which each rank has one, and the same training by one process that has both."""

from __future__ import annotations

import torch
from torch import nn

import sherd
from tests.helpers.training import adamw, batch, sgd

WORLD = 4
HALVES = {"experts.0.*": [0, 1], "experts.1.*": [2, 3]}
ODD = {"experts.0.*": [0], "experts.1.*": [1, 2, 3]}
ACROSS = {"experts.0.*": [0, 2], "experts.1.*": [1, 3]}
OPTIMIZERS = {"AdamW": adamw, "SGD": sgd}
CLIP = 0.05  # clips every step


class Experts(nn.Module):
    """Shared layers with experts between them; all have the same values wherever they are built."""

    def __init__(self, held=(0, 1), seed=0, norm=False):
        super().__init__()
        torch.manual_seed(seed)
        self.before = nn.Linear(15, 7)
        made = [nn.Sequential(nn.Linear(7, 11 + 2 * i), nn.Tanh(), nn.Linear(11 + 2 * i, 7)) for i in range(2)]
        for expert in made:
            expert.append(nn.BatchNorm1d(7, affine=False) if norm else nn.Identity())
        self.experts = nn.ModuleDict({str(index): made[index] for index in held})
        self.after = nn.Linear(7, 5)
        self.double()

    def forward(self, x, expert):
        hidden = torch.tanh(self.before(x))
        return self.after(hidden if expert is None else hidden + self.experts[str(expert)](hidden))


def expert_of(rank, groups=HALVES):
    """The expert that a rank holds."""
    return next(index for index, ranks in enumerate(groups.values()) if rank in ranks)


def loss(model, rank, step, expert, reduction="mean"):
    x, y = batch(rank, step, rows=3 + rank, dtype=torch.float64)
    difference = (model(x, expert) - y).square()
    return difference.mean() if reduction == "mean" else difference.sum()


def distributed(c, strategy, optimizer=adamw, groups=HALVES, **options):
    """This rank's model and optimizer, and the expert that it holds."""
    mine = expert_of(c.rank, groups)
    model = Experts([mine])
    model, optimizer = sherd.distribute(model, optimizer(model), strategy=strategy, comm=c, groups=groups, **options)
    return model, optimizer, mine


def dense(optimizer, steps, used, factor, accumulate=1, clip=None, reduction="mean"):
    """One process that has both experts: its model and optimizer after so many calls of `step()`.

    `used(rank, step)` is the expert that a rank uses, or None; `factor(rank, step)` is what its loss counts.
    """
    model = Experts()
    optimizer = optimizer(model)
    for step in range(steps):
        for rank in range(WORLD):
            (loss(model, rank, step, used(rank, step), reduction) * factor(rank, step)).backward()
        if (step + 1) % accumulate == 0:
            if clip is not None:
                assert torch.nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def state_by_name(model, optimizer):
    """The optimizer's state as `state_dict` has it, by the names of the parameters."""
    state, names = optimizer.state_dict()["state"], [name for name, _ in model.named_parameters()]
    return {f"{names[index]}: {key}": value for index, kept in state.items() for key, value in kept.items()}
