"""Parameters without a gradient on some ranks, or on all, are treated as torch treats them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.training import STRATEGIES, adamw, batch, close, connected, distributed, double, gradients, weights


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = double(), double()

    def forward(self, x, left, right):
        return sum(branch(x) for branch, use in ((self.left, left), (self.right, right)) if use)


PATHS = [  # which branches rank 0 and rank 1 use, step by step
    ((1, 1), (1, 1)),
    ((1, 0), (1, 0)),  # unused on all ranks
    ((1, 1), (1, 0)),  # on one
    ((0, 1), (1, 0)),
    ((1, 0), (1, 0)),
]


def branch_loss(model, rank, step):
    x, y = batch(rank, step, dtype=torch.float64)
    return (model(x, *PATHS[step][rank]) - y).square().mean()


def unused(clear):
    plain = Branches()
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, Branches, adamw)
            plain.load_state_dict(model.state_dict())
            reference = adamw(plain)
            for step in range(len(PATHS)):
                branch_loss(model, c.rank, step).backward()
                sum(branch_loss(plain, rank, step) / 2 for rank in (0, 1)).backward()
                close(gradients(model), gradients(plain), (strategy, step))
                optimizer.step()
                reference.step()
                close(weights(model), weights(plain), (strategy, step))
                clear(model, optimizer)
                clear(plain, reference)
            ours, theirs = (each.state_dict()["state"] for each in (optimizer, reference))
            assert {k: v["step"] for k, v in ours.items()} == {k: v["step"] for k, v in theirs.items()}


def by_optimizer(model, optimizer):
    optimizer.zero_grad()


def by_model(model, optimizer):
    model.zero_grad()


def to_zeros(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


def to_zeros_by_model(model, optimizer):
    model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("clear", [by_optimizer, by_model, to_zeros, to_zeros_by_model])
def test_parameters_unused_on_all_ranks_and_on_one_are_treated_as_torch_does(ranks, clear):
    ranks(2).run(unused, clear)
