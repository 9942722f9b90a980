"""What averaging strategies do, written down plainly: several models in one process, one per team."""

from __future__ import annotations

import torch

from tests.helpers.training import batch, connected, distributed, double, loss_of, sgd, train, weights

STEPS = 9


def run(c, strategy, steps=STEPS, make=double, optimizer=sgd, spoilt=(), rows=lambda rank: 3, **options):
    """The weights after every step of this rank; `spoilt` has (step, rank) whose gradient is NaN."""
    model, optimizer = distributed(c, strategy, make, optimizer, **options)
    dtype, seen = next(model.parameters()).dtype, []
    for step in range(steps):
        x, y = batch(c.rank, step, rows(c.rank), dtype)
        train(model, optimizer, [(x * float("nan") if (step, c.rank) in spoilt else x, y)])
        seen.append(weights(model))
    return model, optimizer, seen


def trained(cases, transport="host"):
    """The weights after every step of this rank, for each (strategy, options)."""
    with connected(transport) as c:
        return [run(c, strategy, **options)[2] for strategy, options in cases]


def by_case(found):
    """What ranks returned of several cases, by case and then by rank."""
    return [list(each) for each in zip(*found, strict=True)]


class Worlds:
    """One model per team, each trained on the batches of its ranks."""

    def __init__(self, teams, size=1, make=double, optimizer=sgd):
        self.teams, self.size = teams, size
        self.models = [make() for _ in range(teams)]
        self.optimizers = [optimizer(model) for model in self.models]
        self.names = [name for name, _ in self.models[0].named_parameters()]

    def values(self, name):
        return [dict(model.named_parameters())[name].data for model in self.models]

    def step(self, step, spoilt=(), summed=False):
        dtype = next(self.models[0].parameters()).dtype
        for team, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            its = range(self.teams * self.size) if summed else range(team * self.size, (team + 1) * self.size)
            if any((step, rank) in spoilt for rank in its):
                continue
            losses = [loss_of(model, batch(rank, step, dtype=dtype)) for rank in its]
            (torch.stack(losses).sum() / len(losses)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def mean(self, name):
        total = self.values(name)[0].clone()
        for other in self.values(name)[1:]:
            total += other
        return total / self.teams

    def average(self):
        for name in self.names:
            mean = self.mean(name)
            for value in self.values(name):
                value.copy_(mean)

    def run(self, exchange, warmup=0, spoilt=(), steps=STEPS):
        """The weights by step and team, where `exchange(step)` follows every step."""
        seen = []
        for step in range(steps):
            self.step(step, spoilt, summed=step < warmup)
            exchange(step)
            seen.append([weights(model) for model in self.models])
        return seen


def close_to(by_rank, expected, size=1, rtol=1e-12):
    for step, teams in enumerate(expected):
        for rank, seen in enumerate(by_rank):
            for name, value in teams[rank // size].items():
                error = (seen[step][name] - value).abs().max()
                assert error <= rtol * value.abs().max(), (step, rank, name, float(error))


def exactly(by_rank, expected, size=1):
    close_to(by_rank, expected, size, rtol=0.0)
