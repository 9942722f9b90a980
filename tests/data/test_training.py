"""Training on a sharded loader is training on one process: the same gradients at uneven ends too."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DataLoader

import sherd
from sherd.data import batch_weight
from tests.helpers.loaders import Buckets, Pairs
from tests.helpers.training import (
    EVERYWHERE,
    STRATEGIES,
    close,
    connected,
    differ,
    double,
    gradients,
    loss_of,
    sgd,
    train,
    weights,
)

BATCH = 2  # per rank


def shuffled(count, batch, **options):
    return DataLoader(Pairs(count), batch, shuffle=True, generator=torch.Generator().manual_seed(3), **options)


def distributed(c, strategy, loader, **options):
    model = double()
    return sherd.distribute(model, sgd(model), loader, strategy=strategy, comm=c, **options)


def plain_weights(loader, epochs=2):
    model = double()
    optimizer = sgd(model)
    for _ in range(epochs):
        train(model, optimizer, loader)
    return weights(model)


def uneven(counts, strategies):
    with connected() as c:
        for strategy, count in itertools.product(strategies, counts):
            expected = plain_weights(shuffled(count, BATCH * c.world))
            model, optimizer, loader = distributed(c, strategy, shuffled(count, BATCH))
            for _ in range(2):
                train(model, optimizer, loader)
            close(weights(model), expected, (strategy, count))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_uneven_ends_on_two_ranks(ranks, strategy):
    ranks(2).run(uneven, range(1, 10), [strategy])


def test_uneven_ends_on_three_ranks(ranks):
    ranks(3).run(uneven, range(1, 9), ["ddp"])
    ranks(3).run(uneven, (1, 2, 8, 10), STRATEGIES[1:])


def accumulated(count):
    """One process takes the mean over micro-batches of all ranks, so the last, smaller one counts as much as others."""
    with connected() as c:
        plain = double()
        reference = sgd(plain)
        whole = shuffled(count, BATCH * c.world)
        for number, data in enumerate((*whole, *whole)):
            (loss_of(plain, data) / 2).backward()
            if number % 2:
                reference.step()
                reference.zero_grad()
        for strategy, where in EVERYWHERE:
            model, optimizer, loader = distributed(
                c, strategy, shuffled(count, BATCH), accumulate=2, accumulate_at=where
            )
            assert len(loader) % 2 == 0
            for _ in range(2):
                train(model, optimizer, loader)
            close(weights(model), weights(plain), (strategy, where))


@pytest.mark.parametrize("count", [5, 7, 13])
def test_accumulation_over_an_uneven_end(ranks, count):
    ranks(2).run(accumulated, count)


def dealt_batches():
    sizes = [1, 3, 2, 4, 2]
    with connected() as c:
        torch.manual_seed(9)
        plain = double()
        reference = sgd(plain)
        torch.manual_seed(9)
        composed = list(DataLoader(Pairs(12), batch_sampler=Buckets(sizes)))
        for first in range(0, len(sizes), c.world):
            group = composed[first : first + c.world]
            train(plain, reference, [tuple(torch.cat(column) for column in zip(*group, strict=True))])
        for strategy in STRATEGIES:
            torch.manual_seed(9)
            loader = DataLoader(Pairs(12), batch_sampler=Buckets(sizes))
            state = torch.get_rng_state()
            model, optimizer, loader = distributed(c, strategy, loader)
            torch.set_rng_state(state)
            train(model, optimizer, loader)
            close(weights(model), weights(plain), strategy)


def test_batches_of_different_sizes_count_by_their_samples(ranks):
    ranks(2).run(dealt_batches)


def summed(reduction, weigh, count):
    """A rank that only repeats a sample adds nothing to a sum, and weighs nothing whatever the loop says."""

    def loss(model, data):
        return loss_of(model, data) * (len(data[0]) if reduction == "sum" else 1)

    with connected() as c:
        plain = double()
        reference = sgd(plain, lr=0.01)
        for data in shuffled(count, BATCH * c.world):
            loss(plain, data).backward()
            reference.step()
            reference.zero_grad()
        for strategy in STRATEGIES:
            model = double()
            optimizer, loader = sgd(model, lr=0.01), shuffled(count, BATCH)
            sherd.distribute(model, optimizer, loader, strategy=strategy, comm=c, loss_reduction=reduction)
            for data in loader:
                if weigh:
                    sherd.weigh(model, len(data[0]))
                loss(model, data).backward()
                optimizer.step()
                optimizer.zero_grad()
            close(weights(model), weights(plain), (strategy, reduction, weigh))


@pytest.mark.parametrize(("reduction", "weigh"), [("sum", False), ("mean", True)])
def test_sums_and_weights_at_uneven_ends(ranks, reduction, weigh):
    # On three ranks the last one repeats what another has: on two, one sample twice would have the mean of one.
    for world, count in ((2, 5), (2, 7), (3, 8)):
        ranks(world).run(summed, reduction, weigh, count)


def two_models():
    """One loader, two models, as for a GAN: the share counts for both."""
    with connected() as c:
        expected = plain_weights(shuffled(5, BATCH * c.world), epochs=1)
        for strategy in STRATEGIES:
            other = double()
            optimizer = sgd(other)
            sherd.distribute(other, optimizer, strategy=strategy, comm=c)
            model, own, loader = distributed(c, strategy, shuffled(5, BATCH))
            for data in loader:
                train(model, own, [data])
                train(other, optimizer, [data])
            close(weights(model), expected, strategy)
            close(weights(other), expected, strategy)


def test_one_loader_feeds_two_models(ranks):
    ranks(2).run(two_models)


def left_early():
    """After a break the share of the last batch is forgotten."""
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer, loader = distributed(c, strategy, shuffled(3, BATCH))
            data = None
            for data in loader:  # noqa: B007
                assert batch_weight.current() != 1.0
                break
            assert batch_weight.current() == 1.0
            loss_of(model, data).backward()
            mine = c.all_gather_object(data)
            plain = double()
            sum(loss_of(plain, each) / c.world for each in mine).backward()
            close(gradients(model), gradients(plain))
            optimizer.zero_grad()
            train(model, optimizer, loader)


def test_a_loop_may_be_left_and_begun_again(ranks):
    ranks(2).run(left_early)


def without_shares():
    """The test of these tests: rank means alone are not the mean."""
    with connected() as c:
        expected = plain_weights(shuffled(5, BATCH * c.world), epochs=1)
        model, optimizer, loader = distributed(c, "ddp", shuffled(5, BATCH))
        train(model, optimizer, list(loader))
        return differ(weights(model), expected)


def test_shares_make_the_difference(ranks):
    assert all(ranks(2).run(without_shares))
