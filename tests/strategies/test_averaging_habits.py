"""Averaging strategies and the rest of a program: the table in docs/averaging.md, cell by cell."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sherd
from sherd.errors import Diverged
from tests.helpers.averaging import Worlds, by_case, close_to, run, trained
from tests.helpers.training import batch, connected, distributed, double, loss_of, same, sgd, train, weights

pytestmark = pytest.mark.ranks
EVERY = 3
BOTH = (sherd.LocalSGD(every=EVERY), sherd.DiLoCo(every=EVERY))


def differs(one, other):
    return not all(torch.equal(one[name], other[name]) for name in one)


def data(rank, step):
    return batch(rank, step, dtype=torch.float64)


# ---------------------------------------------------------------- samples


def unequal(strategies):
    """Rank 1 sees three times as much as rank 0."""
    found = []
    with connected() as c:
        for strategy in strategies:
            model, optimizer = distributed(c, strategy, double)
            start = weights(model)
            for step in range(EVERY):
                sherd.weigh(model, 1 + 2 * c.rank)
                train(model, optimizer, [data(c.rank, step)])
            found.append((start, weights(model)))
    return found


def test_teams_are_weighed_by_what_they_saw(ranks):
    found = ranks(2).run(unequal, BOTH)
    worlds = Worlds(2)
    for step in range(EVERY):
        worlds.step(step)
    for name in worlds.names:
        one, other = worlds.values(name)
        mean = (one + 3 * other) / 4
        for (_, local), (start, diloco) in found:
            torch.testing.assert_close(local[name], mean, rtol=1e-12, atol=1e-14)
            expected = start[name] - 0.7 * 1.9 * (start[name] - mean)
            torch.testing.assert_close(diloco[name], expected, rtol=1e-12, atol=1e-13)


# ---------------------------------------------------------------- what is kept on the wire, slow momentum


def test_bf16_differences_and_slow_momentum(ranks):
    coarse = sherd.DiLoCo(every=EVERY, outer_dtype="bf16")
    cases = [
        (sherd.DiLoCo(every=EVERY), {}),
        (coarse, {}),
        (sherd.DiLoCo(every=EVERY, outer_dtype="bf16", over=2, inner="zero1", fragments=2, delay=0), {}),
        (sherd.LocalSGD(every=EVERY, outer="slowmo", slow_lr=0.8, slow_momentum=0.6), {}),
    ]
    exact, rounded, fragments, slow = by_case(ranks(4).run(trained, cases))
    start = dict(double().named_parameters())
    for name, value in exact[0][EVERY - 1].items():
        moved = (value - start[name]).abs()
        error = (rounded[0][EVERY - 1][name] - value).abs()
        assert 0 < error.max() <= 0.02 * moved.max(), name  # of the difference, not of the value
    assert not any(differs(rounded[0][8], other[8]) for other in rounded)
    for step, name in ((6, "0.weight"), (8, "2.weight")):  # one fragment after the other
        assert all(torch.equal(fragments[0][step][name], other[step][name]) for other in fragments)
        assert not torch.equal(fragments[0][15 - step - 1][name], fragments[2][15 - step - 1][name])
    worlds = Worlds(4)
    before = {name: worlds.values(name)[0].clone() for name in worlds.names}
    momentum = {name: torch.zeros_like(value) for name, value in before.items()}

    def exchange(step):
        if (step + 1) % EVERY == 0:
            for name, anchor in before.items():
                momentum[name].mul_(0.6).add_(anchor - worlds.mean(name))
                anchor.sub_(0.8 * momentum[name])
                for value in worlds.values(name):
                    value.copy_(anchor)

    close_to(slow, worlds.run(exchange))


# ---------------------------------------------------------------- buffers, clipping, accumulation, schedulers


def norms_apart(strategies):
    """Batch norm, clipping and a scheduler: the running mean, a clipped step and the rate after every step."""
    found = []
    with connected() as c:
        for strategy in strategies:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(15, 7), nn.BatchNorm1d(7), nn.Linear(7, 5)).double()
            optimizer = sgd(model, momentum=0.0, weight_decay=0.0)
            model, optimizer = sherd.distribute(model, optimizer, strategy=strategy, comm=c, clip_norm=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, EVERY, 0.5)
            seen = []
            for step in range(2 * EVERY):
                before = weights(model)
                loss_of(model, data(c.rank, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                moved = sum((weights(model)[n] - before[n]).square().sum() for n in before).sqrt()
                seen.append((model[1].running_mean.clone(), float(moved), optimizer.param_groups[0]["lr"]))
            found.append(seen)
    return found


def test_buffers_clipping_and_schedulers(ranks):
    strategies = [*BOTH, sherd.LocalSGD(every=EVERY, over=2), sherd.DiLoCo(every=EVERY, fragments=3, delay=0)]
    by_rank = ranks(4).run(norms_apart, strategies)
    for number, strategy in enumerate(strategies):
        size = 1 if strategy.over == "ranks" else 2
        for step in range(2 * EVERY):
            means, moved, rates = zip(*(found[number][step] for found in by_rank), strict=True)
            meets = (step + 1) % EVERY == 0
            assert all(torch.equal(means[0], other) for other in means) is meets, (strategy, step)
            assert all(torch.equal(means[0], other) for other in means[:size])
            if not meets and number < 3:  # each team by its own norm
                assert moved == pytest.approx([0.01 * rates[0] * 2 ** ((step + 1) // EVERY - step // EVERY)] * 4, 1e-3)
            assert set(rates) == {0.1 * 0.5 ** ((step + 1) // EVERY)}


def accumulated(strategies):
    """Two backwards per step; `every` counts real steps."""
    found = []
    with connected() as c:
        for strategy in strategies:
            model, optimizer = distributed(c, strategy, double, accumulate=2)
            seen = []
            for backward in range(4 * EVERY):
                train(model, optimizer, [data(c.rank, backward)])
                seen.append(weights(model))
            found.append(seen[1::2])
    return found


def test_accumulation_counts_real_steps(ranks):
    for strategy, found in zip(BOTH, by_case(ranks(2).run(accumulated, BOTH)), strict=True):
        for step in range(2 * EVERY):
            assert differs(found[0][step], found[1][step]) is ((step + 1) % EVERY != 0), (strategy, step)


# ---------------------------------------------------------------- unfreezing, loading, several optimizers


def unfrozen(strategies, apart=False):
    found = []
    with connected() as c:
        for strategy in strategies:
            model = double()
            model[0].weight.requires_grad_(False)
            model, optimizer = sherd.distribute(model, sgd(model), strategy=strategy, comm=c)
            seen = []
            for step in range(3 * EVERY):
                if step == EVERY + 1 and not (apart and c.rank):
                    model[0].weight.requires_grad_(True)
                train(model, optimizer, [data(c.rank, step)])
                seen.append(weights(model))
            found.append(seen)
    return found


def test_unfrozen_parameters_join_the_next_exchange(ranks):
    strategies = [*BOTH, sherd.DiLoCo(every=6, fragments=2, delay=2), sherd.DiLoCo(every=EVERY, over=2)]
    start = dict(double().named_parameters())["0.weight"]
    for strategy, found in zip(strategies, by_case(ranks(4).run(unfrozen, strategies)), strict=True):
        values = [[seen[step]["0.weight"] for seen in found] for step in range(3 * EVERY)]
        assert all(torch.equal(value, start) for value in values[EVERY]), strategy
        assert not torch.equal(values[EVERY + 1][0], values[EVERY + 1][3]), strategy
        if strategy.every == EVERY:
            for step in (2 * EVERY - 1, 3 * EVERY - 1):
                assert all(torch.equal(value, values[step][0]) for value in values[step]), strategy


def test_unfreezing_on_some_ranks_is_found_at_the_exchange(ranks):
    with pytest.raises(sherd.RankFailed, match="the teams are out of sync: at step 5 rank 0 exchanges 4") as error:
        ranks(2).run(unfrozen, BOTH[:1], True)
    assert Diverged.__name__ in str(error.value)


def loaded(strategies):
    """The same twelve steps from the beginning, and after others and a load."""
    found = []
    with connected() as c:
        for strategy in strategies:
            for before in (0, 12):
                model, optimizer = distributed(c, strategy, double, optimizer=lambda m: sgd(m, momentum=0.0))
                train(model, optimizer, [data(c.rank, 100 + step) for step in range(before)])
                model.load_state_dict(double().state_dict())
                train(model, optimizer, [data(c.rank, step) for step in range(11)])
                found.append(weights(model))
    return found


def test_loading_restarts_the_outer_state(ranks):
    """The last of these is in the middle of an exchange when it loads."""
    strategies = [sherd.LocalSGD(every=4), sherd.DiLoCo(every=4), sherd.DiLoCo(every=6, fragments=2, delay=2)]
    for found in ranks(2).run(loaded, strategies):
        for fresh, again in zip(found[::2], found[1::2], strict=True):
            same(again, fresh)


def two_optimizers(strategies):
    found = []
    with connected() as c:
        for strategy in strategies:
            model = double()
            body, head = sgd(model[0]), torch.optim.Adam(model[2].parameters(), 0.01)
            model, body, head = sherd.distribute(model, body, head, strategy=strategy, comm=c)
            seen = []
            for step in range(2 * EVERY):
                loss_of(model, data(c.rank, step)).backward()
                for optimizer in (body, head) if step % 2 else (body,):
                    optimizer.step()
                for optimizer in (body, head):
                    optimizer.zero_grad()
                seen.append(weights(model))
            found.append(seen)
    return found


def test_each_optimizer_counts_its_own_steps(ranks):
    strategies = [*BOTH, sherd.DiLoCo(every=EVERY, over=2), sherd.LocalSGD(every=EVERY, over=2, inner="ddp")]
    for strategy, found in zip(strategies, by_case(ranks(4).run(two_optimizers, strategies)), strict=True):
        for step, name in itertools.product(range(2 * EVERY), ("0.weight", "2.weight")):
            equal = all(torch.equal(found[0][step][name], other[step][name]) for other in found)
            expected = (step + 1) % EVERY == 0 if name == "0.weight" else step in (0, 2 * EVERY - 1)
            assert equal is expected, (strategy, step, name)


# ---------------------------------------------------------------- a loader, and its end


def loop(strategies, samples):
    found = []
    with connected() as c:
        for strategy in strategies:
            x, y = batch(0, 0, samples, torch.float64)
            loader = DataLoader(TensorDataset(x, y), batch_size=2)
            model = double()
            model, optimizer, loader = sherd.distribute(model, sgd(model), loader, strategy=strategy, comm=c)
            counts = []
            for _ in range(2):
                for rows in loader:
                    counts.append(len(rows[0]))
                    train(model, optimizer, [rows])
            found.append((counts, weights(model)))
    return found


def test_a_loader_deals_every_sample_once_and_all_ranks_take_as_many_steps(ranks):
    strategies = [*(each.replace(every=5) for each in BOTH), sherd.LocalSGD(every=5, over=2)]
    for strategy, found in zip(strategies, by_case(ranks(4).run(loop, strategies, 37)), strict=True):
        steps = {len(counts) for counts, _ in found}
        assert steps == {10}, strategy  # 37 samples in groups of 8
        assert sum(sum(counts) for counts, _ in found) == 2 * 37
        for _, values in found:
            same(values, found[0][1], strategy)


def ended(strategy):
    """Rank 1 stops early."""
    with connected(timeout=20.0) as c:
        model, optimizer = distributed(c, strategy, double)
        for step in range(EVERY - c.rank):
            train(model, optimizer, [data(c.rank, step)])


def test_a_rank_that_ends_early_is_named(ranks):
    with pytest.raises(sherd.RankFailed, match="rank 1"):
        ranks(2).run(ended, BOTH[0])


def described():
    with connected() as c:
        model, _, _ = run(c, sherd.DiLoCo(every=EVERY, over=2, fragments=2, delay=0), steps=EVERY)
        return sherd.describe(model)


def test_describe(ranks):
    for text in ranks(4).run(described):
        assert "diloco" in text and "outer state" in text
