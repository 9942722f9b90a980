"""What gossip does about everything around a step: buffers, clipping, NaN, schedulers, accumulation, uneven ends,
unfreezing, a loader, several optimizers, loading, memory."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sherd
from sherd.api.training import training_of
from tests.helpers.training import batch, connected, double, loss_of, network, same, sgd, train, weights
from tests.strategies.test_gossip import CASES, DIRECTED, follows, reference, run

pytestmark = pytest.mark.ranks
RING = {"topology": "ring"}
PUSH = {"topology": DIRECTED, "push_sum": True}


def test_a_rank_whose_gradient_is_not_finite_skips_its_update_and_mixes_all_the_same(ranks):
    for options, spoilt in ((RING, {(1, 0), (1, 1), (2, 4)}), (CASES["every"], {(0, 1), (0, 2)}), (PUSH, {(2, 3)})):
        follows(ranks(3).run(run, "host", options, spoilt), reference(3, options, spoilt))


def clipped(model, optimizer, batches):
    for data in batches:
        loss_of(model, data).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()


def clipping():
    return run("host", RING, clip_norm=0.2)


def test_every_rank_clips_by_the_norm_of_its_own_gradient(ranks):
    found = ranks(3).run(clipping)
    follows(found, reference(3, RING, train=clipped), rtol=1e-6)
    with pytest.raises(AssertionError):
        follows(found, reference(3, RING), rtol=1e-6)  # it did clip


def windows(accumulate, schedule, thaw):
    """A loop with what a program may do around its steps: the weights after every real step, and the rates."""
    with connected() as c:
        model = double()
        model[0].requires_grad_(thaw is None)
        model, optimizer = sherd.distribute(
            model, sgd(model), strategy=sherd.Gossip(**RING), comm=c, accumulate=accumulate
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) if schedule else None
        seen, rates = [], []
        for step in range(4):
            if step == thaw:
                model[0].requires_grad_(True)
            for part in range(accumulate):
                train(model, optimizer, [batch(c.rank, 10 * step + part, dtype=torch.float64)])
                if scheduler:
                    scheduler.step()
            seen.append(weights(model))
            rates.append(optimizer.param_groups[0]["lr"])
        return seen, rates


def halves(batches, schedule=False, thaw=None):
    """Two plain models, mixed by halves after every step: of `batches[step][rank]`, each a list with weights."""
    models = [double() for _ in range(2)]
    for model in models:
        model[0].requires_grad_(thaw is None)
    optimizers = [sgd(model) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in optimizers] if schedule else []
    seen = []
    for step, by_rank in enumerate(batches):
        for model, optimizer, parts in zip(models, optimizers, by_rank, strict=True):
            if step == thaw:
                model[0].requires_grad_(True)
            for data, weight in parts:
                (weight * loss_of(model, data)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for one, other in zip(*(model.parameters() for model in models), strict=True):
                mean = (one + other) / 2
                one.copy_(mean)
                other.copy_(mean)
        for scheduler in schedulers:
            scheduler.step()
        seen.append(weights(models[0]))
    return seen


def like(found, expected):
    for step, wanted in enumerate(expected):
        for name, value in wanted.items():
            torch.testing.assert_close(found[step][name], value, rtol=1e-11, atol=1e-11, msg=f"{step} {name}")


@pytest.mark.parametrize(("accumulate", "schedule", "thaw"), [(3, True, None), (1, True, None), (1, False, 2)])
def test_windows_schedulers_and_unfreezing_are_those_of_a_plain_loop(ranks, accumulate, schedule, thaw):
    batches = [
        [
            [(batch(rank, 10 * step + part, dtype=torch.float64), 1 / accumulate) for part in range(accumulate)]
            for rank in range(2)
        ]
        for step in range(4)
    ]
    expected = halves(batches, schedule, thaw)
    for seen, rates in ranks(2).run(windows, accumulate, schedule, thaw):
        like(seen, expected)
        assert rates == [0.1 * 0.5 ** (step + 1) if schedule else 0.1 for step in range(4)]


def with_buffers():
    with connected() as c:
        synced = nn.Sequential(network(), nn.SyncBatchNorm(5))
        synced, optimizer = sherd.distribute(synced, sgd(synced), strategy="gossip", comm=c)
        own = nn.Sequential(network(), nn.BatchNorm1d(5))
        data = batch(c.rank)
        assert torch.allclose(synced(data[0]), own(data[0]), atol=1e-6)  # this rank's statistics only
        model = nn.Sequential(network(), nn.BatchNorm1d(5))
        model, optimizer = sherd.distribute(model, sgd(model), strategy="gossip", comm=c)
        own = nn.Sequential(network(), nn.BatchNorm1d(5))
        train(model, optimizer, [batch(c.rank)])
        train(own, sgd(own), [batch(c.rank)])
        mine = {name: buffer.clone() for name, buffer in model.named_buffers()}
        same(mine, dict(own.named_buffers()))
        with sherd.consensus(model):
            inside = {name: buffer.clone() for name, buffer in model.named_buffers()}
        same(dict(model.named_buffers()), mine)
        return mine, inside


def test_statistics_and_buffers_stay_each_ranks_own_and_are_averaged_at_the_consensus(ranks):
    (mine, inside), (theirs, other) = ranks(2).run(with_buffers)
    same(inside, other)
    assert not torch.equal(mine["1.running_mean"], theirs["1.running_mean"])
    torch.testing.assert_close(inside["1.running_mean"], (mine["1.running_mean"] + theirs["1.running_mean"]) / 2)


def with_a_loader(count):
    """Two epochs of a loader whose last group is shorter: the batches that this rank saw, and its weights."""
    with connected() as c:
        columns = (torch.randn(count, n, generator=torch.Generator().manual_seed(n)).double() for n in (15, 5))
        loader, model = DataLoader(TensorDataset(*columns), batch_size=2), double()
        model, optimizer, loader = sherd.distribute(model, sgd(model), loader, strategy=sherd.Gossip(**RING), comm=c)
        batches, seen = [], []
        for x, y in (each for _ in range(2) for each in loader):
            train(model, optimizer, [(x, y)])
            batches.append((x, y))
            seen.append(weights(model))
        return batches, seen


def test_at_an_uneven_end_a_rank_without_samples_has_no_gradient_and_steps_and_mixes_like_the_others(ranks):
    for count, sizes in ((10, [2, 2, 1]), (9, [2, 2, 1]), (12, [2, 2, 2])):
        (ours, mine), (theirs, others) = ranks(2).run(with_a_loader, count)
        assert [len(x) for x, _ in ours] == [len(x) for x, _ in theirs] == 2 * sizes
        nothing = [count == 9 and step % 3 == 2 for step in range(6)]  # of nine, one is left for two ranks
        batches = [
            [[(one, 1.0)], [(other, 0.0 if empty else 1.0)]]
            for one, other, empty in zip(ours, theirs, nothing, strict=True)
        ]
        like(mine, halves(batches))
        like(others, halves(batches))


def several_and_loading():
    """Two optimizers mix their own parameters; loading makes all ranks equal."""
    with connected() as c:
        model = double()
        optimizers = sgd(model[0]), sgd(model[2])
        model, *optimizers = sherd.distribute(model, *optimizers, strategy=sherd.Gossip(**PUSH), comm=c)
        for step in range(4):
            loss_of(model, batch(c.rank, step, dtype=torch.float64)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        seen = weights(model)
        model.load_state_dict(network(seed=5 + c.rank, dtype=torch.float64).state_dict())
        loaded = weights(model)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group.update(lr=0.0)
        loss_of(model, batch(c.rank, dtype=torch.float64)).backward()
        for optimizer in optimizers:
            optimizer.step()
        return [seen], loaded, weights(model)


def test_several_optimizers_mix_their_own_parameters_and_loading_starts_anew(ranks):
    by_rank = ranks(3).run(several_and_loading)
    expected = reference(3, PUSH, steps=4)[-1:]
    follows([(seen, None) for seen, *_ in by_rank], expected)
    for _, loaded, after in by_rank:
        same(loaded, dict(network(seed=5, dtype=torch.float64).named_parameters()))
        for name, value in loaded.items():  # masses are 1 again, so equal values stay
            torch.testing.assert_close(after[name], value, rtol=1e-15, atol=1e-15)


class Handler(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def told(transport, options):
    """Memory by kind, and what is said."""
    handler = Handler()
    logging.getLogger("sherd").addHandler(handler)
    try:
        with connected(transport) as c:
            model = nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 3)).double()
            model, optimizer = sherd.distribute(
                model, torch.optim.Adam(model.parameters()), strategy=sherd.Gossip(**options), comm=c
            )
            model(torch.ones(2, 300, dtype=torch.float64) * c.rank).sum().backward()
            optimizer.step()
            sizes = [bucket.numel for bucket in training_of(model).engine.layout.buckets]
            model.state_dict()
            model.state_dict()
            return training_of(model).memory(), sizes, sherd.describe(model), handler.texts
    finally:
        logging.getLogger("sherd").removeHandler(handler)


def test_memory_is_one_more_copy_of_the_parameters_and_two_messages_where_there_are_any(ranks):
    for transport, rooms in (("host", 0), ("c10d", 2)):
        for options in (RING, PUSH):
            for memory, sizes, described, texts in ranks(3).run(told, transport, options):
                padded = 8 * sum(sizes)
                assert len(sizes) > 1
                assert memory["neighbours"] == padded + rooms * 8 * max(sizes)
                assert memory["parameters"] == padded
                assert "every rank trains alone" in described and "neighbours" in described
                assert sum("state_dict() has this rank's weights" in text for text in texts) == 1


def searching():
    """A step that evaluates the loss several times is mixed once."""
    with connected() as c:
        model, data = double(), batch(c.rank, dtype=torch.float64)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        model, optimizer = sherd.distribute(model, optimizer, strategy=sherd.Gossip(**RING), comm=c)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, data)
            loss.backward()
            return loss

        optimizer.step(closure)
        return weights(model), c.counters.last_step["lend"].calls


def test_an_optimizer_that_searches_mixes_what_it_found(ranks):
    found = []
    for rank in range(2):
        model, data = double(), batch(rank, dtype=torch.float64)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

        def closure(model=model, data=data, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, data)
            loss.backward()
            return loss

        optimizer.step(closure)
        found.append(weights(model))
    mean = {name: (found[0][name] + found[1][name]) / 2 for name in found[0]}
    for mixed, calls in ranks(2).run(searching):
        like([mixed], [mean])
        assert calls == 1
