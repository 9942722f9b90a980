"""An order that is agreed on in pieces: long epochs begin as soon as short ones, and give what one process reads."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler

from sherd import Diverged, SherdError
from sherd.data import batch_weight, order
from tests.data.test_loader import BATCH, LOADERS, three_epochs
from tests.helpers.loaders import Backwards, Buckets, Numbers, Pairs, counted, epoch, sharded
from tests.helpers.training import close, connected, distributed, double, sgd, train, weights

LONG = int(1e10)
WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}


def pieces(samples, batches=2):
    """Agree on so few items at a time."""
    return mock.patch.multiple(order, SAMPLES=samples, BATCHES=batches)


class Drawn(Backwards):
    """Counts what it was asked for."""

    drawn = 0

    def __iter__(self):
        for index in range(self.count):
            self.drawn += 1
            yield index


class Endless(Sampler):
    """Says nothing of its length, and has no end; it draws from torch's own random numbers."""

    def __iter__(self):
        while True:
            yield int(torch.randint(1000, ()))


class EndlessBatches(Endless):
    def __iter__(self):
        return ([n, n + 1][: n % 3 + 1] for n in itertools.count())


def long(batch, workers):
    sampler = RandomSampler(Numbers(50), replacement=True, num_samples=LONG)
    return DataLoader(Numbers(50), batch, sampler=sampler, **(WORKERS if workers else {}))


def first_batches(loader, count):
    return [(batch.tolist(), batch_weight.current()) for batch in itertools.islice(loader, count)]


def begun(workers):
    """Two epochs that are left early."""
    with connected() as c:
        torch.manual_seed(5 + c.rank)
        loader = sharded(long(BATCH, workers), c)
        return [first_batches(loader, 4) for _ in range(2)], len(loader), int(torch.randint(1000, ()))


@pytest.mark.parametrize("workers", [False, True])
def test_an_epoch_of_ten_billion_samples_begins(ranks, workers):
    torch.manual_seed(5)
    plain = long(2 * BATCH, workers)
    expected = [[batch.tolist() for batch in itertools.islice(plain, 4)] for _ in range(2)]
    after = int(torch.randint(1000, ()))
    by_rank, lengths, draws = zip(*ranks(2).run(begun, workers), strict=True)
    assert [counted(epochs) for epochs in zip(*by_rank, strict=True)] == expected
    assert set(lengths) == {len(plain)} == {-(-LONG // (2 * BATCH))} and draws[0] == after


def bounded():
    with connected() as c:
        sampler = Drawn(LONG)
        loader = sharded(DataLoader(Numbers(LONG), BATCH, sampler=sampler), c)
        first_batches(loader, 2)
        assert sampler.drawn == order.SAMPLES
        short = Drawn(2 * order.SAMPLES)
        loader = sharded(DataLoader(Numbers(len(short)), 5000, sampler=short), c)
        drawn = [short.drawn for _ in loader]
        assert drawn == [order.SAMPLES] * 6 + [2 * order.SAMPLES] * 8  # 10,000 in each iteration


def test_a_piece_is_drawn_when_it_is_needed(ranks):
    ranks(2).run(bounded)


def in_pieces(length, *arguments):
    with pieces(length):
        return three_epochs(*arguments)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize(("world", "count", "piece"), [(2, 12, 4), (2, 12, 5), (3, 20, 1)])
def test_in_pieces_too_the_order_is_that_of_one_process(ranks, name, world, count, piece):
    torch.manual_seed(5)
    plain = LOADERS[name](count, world * BATCH)
    expected = [[batch.tolist() for batch in plain]]
    expected.append([batch.tolist() for batch in itertools.islice(plain, 1)])
    expected.append([batch.tolist() for batch in plain])
    after = int(torch.randint(1000, ()))
    by_rank, lengths, draws = zip(*ranks(world).run(in_pieces, piece, count, name), strict=True)
    assert [counted(epochs) for epochs in zip(*by_rank, strict=True)] == expected
    assert set(lengths) == {len(plain)} and draws[0] == after


def own_batches(sizes):
    with connected() as c, pieces(1, batches=2):
        torch.manual_seed(4 + c.rank)
        return epoch(sharded(DataLoader(Numbers(sum(sizes)), batch_sampler=Buckets(sizes), **WORKERS), c))


@pytest.mark.parametrize("world", [2, 3])
def test_batches_of_a_batch_sampler_come_in_pieces(ranks, world):
    sizes = [1, 2, 4, 3, 2, 5, 1]
    torch.manual_seed(4)
    plain = [batch.tolist() for batch in DataLoader(Numbers(sum(sizes)), batch_sampler=Buckets(sizes), **WORKERS)]
    by_rank = ranks(world).run(own_batches, sizes)
    assert [batch for hands in zip(*by_rank, strict=True) for batch, counts in hands if counts] == plain
    for start, hands in zip(range(0, len(sizes), world), zip(*by_rank, strict=True), strict=True):
        rows = sizes[start : start + world]
        expected = [row * world / sum(rows) for row in rows] + [0.0] * (world - len(rows))
        assert [counts for _, counts in hands] == pytest.approx(expected)


def endless(workers):
    """It goes on over several pieces, and ranks that were seeded alike stay alike."""
    with connected() as c, pieces(7, batches=3):
        torch.manual_seed(2)
        options = WORKERS if workers else {}
        samples = sharded(DataLoader(Numbers(1000), 2, sampler=Endless(), **options), c)
        batches = sharded(DataLoader(Numbers(1000), batch_sampler=EndlessBatches(), **options), c)
        with pytest.raises(TypeError, match=r"has no len\(\)"):
            len(samples)
        seen = first_batches(samples, 9)
        return seen, first_batches(batches, 9), torch.get_rng_state()


@pytest.mark.parametrize("workers", [False, True])
def test_a_sampler_may_have_no_end(ranks, workers):
    samples, batches, states = zip(*ranks(2).run(endless, workers), strict=True)
    torch.manual_seed(2)
    torch.empty((), dtype=torch.int64).random_()  # the seed of the workers
    drawn = torch.stack([torch.randint(1000, ()) for _ in range(36)])
    assert counted(samples) == drawn.view(9, 4).tolist()
    assert [[batch for batch, _ in hands] for hands in batches] == [
        [[n, n + 1][: n % 3 + 1] for n in range(rank, 18, 2)] for rank in range(2)
    ]
    assert torch.equal(*states)


def different_numbers(piece, workers):
    """Rank 0 draws far ahead where rank 1 draws nothing: what they agree on must not come between their steps."""
    with connected() as c, pieces(piece):
        torch.manual_seed(3)
        options = {**WORKERS, "num_workers": workers[c.rank]} if workers[c.rank] else {}
        loader = sharded(DataLoader(Numbers(41), 2, shuffle=True, **options), c)
        found = []
        for _ in range(2):
            for number, batch in enumerate(loader):
                found.append((batch.tolist(), batch_weight.current()))
                c.all_reduce(torch.full((number + 1,), float(number))).wait()  # a step, of a shape of its own
        return found


@pytest.mark.parametrize("piece", [1, 6, 13])
@pytest.mark.parametrize("workers", [(3, 0), (0, 2), (1, 3)])
def test_ranks_with_different_numbers_of_workers_agree_at_the_same_batches(ranks, piece, workers):
    torch.manual_seed(3)
    plain = DataLoader(Numbers(41), 4, shuffle=True)
    expected = [batch.tolist() for _ in range(2) for batch in plain]
    assert counted(ranks(2).run(different_numbers, piece, workers)) == expected


def interleaved(workers):
    """Two iterators of one loader, and one that is dropped in the middle: each has an order of its own."""
    with connected() as c, pieces(5):
        torch.manual_seed(8)
        loader = sharded(DataLoader(Numbers(30), 2, sampler=Backwards(30), **(WORKERS if workers else {})), c)
        whole = [batch for batch, _ in epoch(loader)]
        assert len(whole) == 8 and whole[0] == [[29, 28], [27, 26]][c.rank] and whole[-1] == [1 - c.rank]
        first, second = iter(loader), iter(loader)
        found = [[], []]
        for turn in (0, 0, 1, 0, 1, 1, 1, 0, 0, 1):
            found[turn].append(next((first, second)[turn]).tolist())
            c.barrier().wait()
        assert found == [whole[:5], whole[:5]]
        del first
        assert [batch.tolist() for batch in second] == whole[5:]
        assert batch_weight.current() == 1.0


@pytest.mark.parametrize("workers", [False, True])
def test_two_iterators_of_one_loader(ranks, workers):
    ranks(2).run(interleaved, workers)


def kept_workers(transport):
    """Persistent workers, of which ranks have different numbers, over epochs that are left and begun again."""
    with connected(transport) as c, pieces(6):
        options = {**WORKERS, "num_workers": 1 + 2 * c.rank, "persistent_workers": True}
        torch.manual_seed(c.rank)
        loader = DataLoader(Numbers(37), 2, shuffle=True, generator=torch.Generator().manual_seed(9), **options)
        sharded(loader, c)
        found = []
        for stop in (3, None, 1, None):
            for batch in itertools.islice(loader, stop):
                found.append((batch.tolist(), batch_weight.current()))
                c.barrier().wait()
        return found


@pytest.mark.parametrize("transport", ["host", "c10d"])
def test_persistent_workers_serve_epochs_in_pieces(ranks, transport):
    plain = DataLoader(
        Numbers(37), 4, shuffle=True, generator=torch.Generator().manual_seed(9), persistent_workers=True, **WORKERS
    )
    expected = [batch.tolist() for stop in (3, None, 1, None) for batch in itertools.islice(plain, stop)]
    assert counted(ranks(2).run(kept_workers, transport)) == expected


def left_and_begun_again(workers):
    """Training over an uneven end, after an epoch that was left with batches drawn ahead."""
    with connected() as c, pieces(4):
        options = WORKERS if workers else {}
        plain = double()
        reference = sgd(plain)
        torch.manual_seed(1)
        for stop in (2, None, None):
            loader = DataLoader(Pairs(17), 2 * c.world, shuffle=True)
            train(plain, reference, itertools.islice(loader, stop))
        model, optimizer = distributed(c, "zero2", double, sgd)
        loader = sharded(DataLoader(Pairs(17), 2, shuffle=True, **options), c)
        torch.manual_seed(1)
        for stop in (2, None, None):
            train(model, optimizer, itertools.islice(loader, stop))
        close(weights(model), weights(plain), workers)


@pytest.mark.parametrize("workers", [False, True])
def test_training_goes_on_after_an_epoch_that_was_left(ranks, workers):
    ranks(2).run(left_and_begun_again, workers)


def apart():
    """Rank 1 leaves its epoch and begins another where rank 0 goes on."""
    with connected(timeout=20.0) as c, pieces(4):
        loader = sharded(DataLoader(Numbers(40), 2, sampler=Backwards(40)), c)
        batches = iter(loader)
        next(batches)
        with pytest.raises(SherdError) as caught:
            for batch in batches if c.rank == 0 else loader:
                c.barrier().wait()
                del batch
        return type(caught.value).__name__, str(caught.value)


def test_ranks_that_read_different_pieces_are_told_which(ranks):
    (_, _), (kind, text) = ranks(2).run(apart)
    assert kind == "Diverged"
    assert "rank 0 is about to agree on the order of its samples from item 4 on, rank 1 from item 0 on" in text


def a_step_against_a_piece():
    with connected(timeout=20.0) as c, pieces(4):
        batches = iter(sharded(DataLoader(Numbers(40), 2, sampler=Backwards(40)), c))
        next(batches)
        with pytest.raises(Diverged) as caught:
            if c.rank:
                c.barrier().wait()
            else:
                next(batches)
        return str(caught.value)


def test_a_rank_that_takes_a_step_instead_is_told_of_the_piece(ranks):
    assert all("the order of an epoch from its item 4 on" in text for text in ranks(2).run(a_step_against_a_piece))
