"""Optimizers that decide by the loss: every rank gives them the loss of all ranks, so every rank decides alike."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import optim
from torch.utils.data import DataLoader

import sherd
from sherd import ConfigError
from tests.helpers.loaders import Pairs
from tests.helpers.training import connected, double, loss_of, weights

SEARCHES = ("strong_wolfe", None)
ROWS = 5  # of the whole batch per rank, before the rest that makes it uneven


def lbfgs(model, search, **options):
    lr = 0.05 if search is None else 1.0
    return optim.LBFGS(model.parameters(), **{"lr": lr, "max_iter": 5, "line_search_fn": search, **options})


def rows(first, last):
    """Some samples, of very different sizes: so ranks have very different losses."""
    samples = [Pairs(0)[index] for index in range(first, last)]
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    return x, y * torch.arange(first + 1, last + 1, dtype=torch.float64)[:, None]


def parts(world, step):
    """What the ranks have in a step: as many samples and one more, and so on."""
    sizes = [ROWS + rank for rank in range(world)]
    starts = [100 * step + sum(sizes[:rank]) for rank in range(world)]
    return [rows(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def together(batches):
    return tuple(torch.cat(column) for column in zip(*batches, strict=True))


def near(found, expected, rtol=1e-9):
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= rtol * value.abs().max(), name


def steps(model, optimizer, batches, before=None, inside=None, as_float=False, loss_of=loss_of):
    """Several steps by a closure; what they return."""
    losses = []
    for data in batches:

        def closure(data=data):
            optimizer.zero_grad()
            if inside is not None:
                inside(model, data)
            loss = loss_of(model, data)
            loss.backward()
            return loss.item() if as_float else loss

        if before is not None:
            before(model, data)
        losses.append(optimizer.step(closure))
    return losses


def weigh(model, data):
    sherd.weigh(model, len(data[0]))


def sum_of(model, data):
    return (model(data[0]) - data[1]).square().sum() / 50


WAYS = {
    "weighed inside the closure": ({}, {"inside": weigh}),
    "weighed before the step": ({}, {"before": weigh}),
    "a number": ({}, {"inside": weigh, "as_float": True}),
    "sums": ({"loss_reduction": "sum"}, {"loss_of": sum_of}),
}


def of_one_process(search, way):
    with connected() as c:
        options, loop = WAYS[way]
        batches = [parts(c.world, step) for step in range(3)]
        plain = double()
        alone = {name: value for name, value in loop.items() if name in ("as_float", "loss_of")}
        expected = steps(plain, lbfgs(plain, search), [together(each) for each in batches], **alone)
        model = double()
        optimizer = lbfgs(model, search)
        sherd.distribute(model, optimizer, strategy="ddp", comm=c, **options)
        found = steps(model, optimizer, [each[c.rank] for each in batches], **loop)
        near(weights(model), weights(plain))
        for mine, value in zip(found, expected, strict=True):
            assert type(mine) is type(value) and math.isclose(mine, value, rel_tol=1e-9)
        counted = optimizer.state[next(model.parameters())]
        assert counted["func_evals"] > 3  # it did search
        return [float(mine) for mine in found], counted["func_evals"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("world", [2, 3])
def test_lbfgs_takes_the_steps_of_one_process(ranks, world, search, way):
    first, *others = ranks(world).run(of_one_process, search, way)
    assert all(other == first for other in others)  # the very bits, and as many evaluations


def by_shares(search, count):
    """A loader with an uneven end: shares make means of parts the mean of all, of losses as of gradients."""
    with connected() as c:
        plain = double()
        whole = DataLoader(Pairs(count), 3 * c.world)
        expected = steps(plain, lbfgs(plain, search), whole)
        model = double()
        optimizer, loader = lbfgs(model, search), DataLoader(Pairs(count), 3)
        sherd.distribute(model, optimizer, loader, strategy="ddp", comm=c)
        found = steps(model, optimizer, loader)
        near(weights(model), weights(plain))
        assert [float(loss) for loss in found] == pytest.approx([float(loss) for loss in expected], rel=1e-9)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(("world", "count"), [(2, 13), (2, 17), (3, 10), (3, 11)])  # one rank repeats a sample, or two
def test_uneven_ends_of_a_loader_count_in_the_loss(ranks, world, count, search):
    ranks(world).run(by_shares, search, count)


def by_a_tolerance():
    """A search ends where the loss hardly changes, which the loss of rank 0 alone does after the first step."""

    def evaluations(model, batches, c=None):
        optimizer = lbfgs(model, None, lr=0.1, max_iter=10, tolerance_change=0.004)
        if c is not None:
            sherd.distribute(model, optimizer, strategy="ddp", comm=c)
        steps(model, optimizer, batches, inside=weigh if c is not None else None)
        return optimizer.state[next(model.parameters())]["func_evals"]

    with connected() as c:
        batches = parts(c.world, 0)
        plain, model = double(), double()
        expected = evaluations(plain, [together(batches)])
        assert evaluations(model, [batches[c.rank]], c) == expected > 2
        near(weights(model), weights(plain))


def test_a_tolerance_ends_the_search_of_all_ranks_at_once(ranks):
    ranks(2).run(by_a_tolerance)


class Backtracking(optim.Optimizer):
    """Halves its step until the loss falls, which it finds out without a gradient."""

    def __init__(self, params):
        super().__init__(params, {"lr": 64.0})

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            before = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients, values = ([copy.deepcopy(t) for t in ts] for ts in ([p.grad for p in parameters], parameters))
        self.tried, lr = 0, self.defaults["lr"]
        while True:
            for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
                parameter.copy_(value).add_(gradient, alpha=-lr)
            self.tried, lr = self.tried + 1, lr / 2
            if (loss := closure(backward=False)) < before:
                return loss


def backtracking(weighed):
    def run(model, optimizer, data, weigh):
        def closure(backward=True):
            loss = loss_of(model, data)
            if weigh:
                sherd.weigh(model, len(data[0]))
            if backward:
                optimizer.zero_grad()
                loss.backward()
            return loss

        losses = [float(optimizer.step(closure)) for _ in range(3)]
        return losses, optimizer.tried

    with connected() as c:
        batches = [rows(7 * rank, 7 * rank + (4 + rank if weighed else 4)) for rank in range(c.world)]
        plain, model = double(), double()
        expected, tried = run(plain, Backtracking(plain.parameters()), together(batches), False)
        optimizer = Backtracking(model.parameters())
        sherd.distribute(model, optimizer, strategy="ddp", comm=c)
        found, mine = run(model, optimizer, batches[c.rank], weighed)
        assert found == pytest.approx(expected, rel=1e-9) and mine == tried > 1
        near(weights(model), weights(plain))


@pytest.mark.parametrize("weighed", [False, True])
def test_a_closure_may_evaluate_without_a_backward(ranks, weighed):
    ranks(2).run(backtracking, weighed)


def no_loss():
    with connected() as c:
        for returned, what in ((None, "None"), ((1.0, 2.0), "a tuple"), (torch.zeros(2), r"a tensor of shape \(2,\)")):
            model = double()
            optimizer = lbfgs(model, None)
            sherd.distribute(model, optimizer, strategy="ddp", comm=c)

            def closure(model=model, optimizer=optimizer, returned=returned):
                optimizer.zero_grad()
                loss_of(model, rows(0, 4)).backward()
                return returned

            with pytest.raises(ConfigError, match=rf"the closure of LBFGS\.step\(\) returned {what} .*`return loss`"):
                optimizer.step(closure)
        model = double()
        muon = optim.Muon([p for p in model.parameters() if p.dim() == 2])
        sherd.distribute(model, muon, strategy="ddp", comm=c)
        assert muon.step(lambda: loss_of(model, rows(0, 4)).backward()) is None  # it can do without


def test_a_closure_without_a_loss_is_refused_where_the_loss_decides(ranks):
    ranks(2).run(no_loss)


def weighs_nothing():
    with connected() as c:
        model = double()
        optimizer = lbfgs(model, None, max_iter=1)
        sherd.distribute(model, optimizer, strategy="ddp", comm=c)
        data = rows(0, 4)

        def closure():
            optimizer.zero_grad()
            sherd.weigh(model, 0 if c.rank else 4)
            loss = loss_of(model, data) * (math.nan if c.rank else 1.0)
            loss.backward()
            return loss

        plain = double()
        expected = loss_of(plain, data).item()
        assert float(optimizer.step(closure)) == pytest.approx(expected, rel=1e-12)


def test_a_rank_that_weighs_nothing_may_have_no_loss(ranks):
    ranks(2).run(weighs_nothing)
