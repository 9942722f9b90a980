"""Parameters that one rank owns whole: Muon and Adafactor under ZeRO, against torch's own on the same gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

import sherd
from tests.helpers.comm_reference import reduced
from tests.helpers.training import STRATEGIES, connected, same, weights

STEPS = 4


def model_of_matrices():
    """Matrices of several shapes, a convolution in channels_last, and vectors between them. Small ones: Muon multiplies
    in bf16, which many CPUs only emulate."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    return nn.Sequential(
        *(convolution, nn.GroupNorm(2, 8), nn.Flatten()),
        *(nn.Linear(8 * 9, 40), nn.Tanh(), nn.Linear(40, 33, bias=False), nn.LayerNorm(33), nn.Linear(33, 17)),
    )


def muon_and_adamw(model):
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return optim.Muon(matrices, lr=0.02, weight_decay=0.1), optim.AdamW(others, lr=0.01)


def adafactor(model):
    return (optim.Adafactor(model.parameters(), lr=0.02, weight_decay=0.1),)


def loss_of(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(5, 3, 5, 5, generator=generator), torch.randint(17, (5,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)


def trained(c, make, strategy, **options):
    model = model_of_matrices()
    optimizers = make(model)
    sherd.distribute(model, *optimizers, strategy=strategy, comm=c, **options)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, c.rank, step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return weights(model), losses


def by_torch(world, make, group):
    """One process, with the mean of all ranks' gradients, added in groups and then in the order of these."""
    model = model_of_matrices()
    optimizers = make(model)
    for step in range(STEPS):
        parameters = list(model.parameters())
        by_rank = [torch.autograd.grad(loss_of(model, rank, step), parameters) for rank in range(world)]
        for parameter, *gradients in zip(parameters, *by_rank, strict=True):
            parameter.grad = reduced(gradients, group, "mean")
        for optimizer in optimizers:
            optimizer.step()
    return weights(model)


def every_strategy(transport):
    torch.set_num_threads(1)  # as the ranks of one host have: in a world of one too
    with connected(transport) as c:
        for make in (muon_and_adamw, adafactor):
            expected, losses = trained(c, make, "ddp")
            same(expected, by_torch(c.world, make, c.tree.group), "ddp")
            for strategy in STRATEGIES[1:]:
                found, its = trained(c, make, strategy)
                same(found, expected, (make.__name__, strategy))
                assert its == losses
            for options in ({"accumulate_at": "rank"}, {"clip_norm": 0.05}, {"bucket_bytes": 1024}):
                clipped = trained(c, make, "ddp", **options)[0]
                for strategy in ("zero1", "zero2", "zero3"):
                    same(trained(c, make, strategy, **options)[0], clipped, (make.__name__, strategy, options))


def test_torchs_muon_and_adafactor_have_their_own_bits_under_every_strategy(ranks):
    for world, transport in ((1, "auto"), (2, "c10d"), (3, "host")):
        ranks(world).run(every_strategy, transport)


@pytest.mark.hosts
def test_over_hosts_too(hosts):
    hosts(2, 2).run(every_strategy, "cluster")
