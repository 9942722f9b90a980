"""Which samples a figure is about: those of the batch at hand, of an epoch, and of which loader."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import sherd
from sherd import ConfigError
from sherd.data import batch_weight
from tests.helpers.loaders import Numbers
from tests.helpers.training import network, sgd


def distributed(*loaders, model=None):
    model = model or network()
    return sherd.distribute(model, sgd(model), *loaders, strategy="ddp")[2:]


def refused(call, *arguments, **options):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **options)
    return str(caught.value)


# ---------------------------------------------------------------- no batch at hand


def after_the_loop():
    """The last batch of rank 1 is only repeated; what it has added up over the epoch is not."""
    loader, other = distributed(DataLoader(Numbers(5), 1), DataLoader(Numbers(6), 1))
    total, seen = 0.0, 0
    for rows in loader:
        own = batch_weight.samples()
        total, seen = total + float(rows.sum()) * own, seen + own
    words = [refused(sherd.mean, total / seen)]
    for rows in list(loader):
        words.append(refused(sherd.mean, rows.double().mean()))
    for _ in loader:
        break
    words.append(refused(sherd.mean, 1.0, loader=loader))
    distributed(DataLoader(Numbers(4), 1))
    words.append(refused(sherd.mean, 1.0))
    next(iter(other))
    words.append(refused(sherd.mean, 1.0))
    return sherd.mean(total / seen, n=seen), words


def test_without_a_batch_at_hand_n_has_to_be_said(ranks):
    for mean, words in ranks(2).run(after_the_loop):
        assert mean == 2.0 and len(words) == 7
        assert all("rank 0: sherd.mean got no n=" in each and "n=samples" in each for each in words)


# ---------------------------------------------------------------- batches that the dataset makes


class Batches(Dataset):
    """Item i is a whole batch: four times i, the last one two times."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.full((4 if index < 4 else 2,), int(index))


class Keys(Sampler):
    """Keys that have lengths, which say nothing of samples."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter(["a", "bb", "ccc"])


class Keyed(Dataset):
    def __getitem__(self, key):
        return torch.full((2,), len(key))


def batches_of_the_dataset(workers):
    options = {"num_workers": 1, "multiprocessing_context": "fork"} if workers else {}
    loader, keyed = distributed(
        DataLoader(Batches(), batch_size=None, **options), DataLoader(Keyed(), batch_size=None, sampler=Keys())
    )
    rows, means, keys = [], [], []
    for batch in loader:
        rows += sherd.gather(batch).tolist()
        means.append(sherd.mean(batch.double().mean()))
    for batch in keyed:
        assert batch_weight.batches()[0].loaded == 2
        keys += sherd.gather(batch).tolist()
    return rows, [mean.item() for mean in means], keys


@pytest.mark.parametrize("workers", [False, True])
def test_batches_that_the_dataset_makes_are_counted_by_rows(ranks, workers):
    rows = [number for number in range(5) for _ in range(4 if number < 4 else 2)]
    expected = {1: [0.0, 1.0, 2.0, 3.0, 4.0], 2: [0.5, 2.5, 4.0]}
    for world, means in expected.items():
        assert ranks(world).run(batches_of_the_dataset, workers) == [(rows, means, [1, 1, 2, 2, 3, 3])] * world


# ---------------------------------------------------------------- several loaders


def in_turns():
    """`zip`: in the last iteration rank 1 repeats what the one loader gives, and not what the other does."""
    a, b = distributed(DataLoader(Numbers(5), 1), DataLoader(Numbers(6), 1))
    found, words = [], []
    for x, y in zip(a, b, strict=True):
        found.append((sherd.gather(x, loader=a).tolist(), sherd.gather(y, loader=b).tolist()))
        found[-1] += (sherd.mean(x.double().mean(), loader=a).item(), sherd.mean(float(y), loader=b))
        if len(found) == 3:
            words = [refused(sherd.gather, x), refused(sherd.mean, 1.0), refused(sherd.gather, (x, y), loader=[1])]
    words += [refused(sherd.mean, 1.0, n=1, loader=a), refused(sherd.gather, torch.zeros(9), loader=a)]
    return found, [*words, refused(sherd.gather, 1.0, loader=a)], sherd.gather(1)


def test_loaders_that_take_turns_are_told_apart(ranks):
    for found, words, after in ranks(2).run(in_turns):
        assert found == [([0, 1], [0, 1], 0.5, 0.5), ([2, 3], [2, 3], 2.5, 2.5), ([4], [4, 5], 4.0, 4.5)]
        assert after == [1, 1] and "rank 1: sherd.gather got 1 rows, of which 0 or 1 are this rank's own" in words[0]
        assert "loader=...) with that loader" in words[0] and "whose current batches have 0 or 1 samples" in words[1]
        assert "a list that was not distributed" in words[2] and "both n= and loader=" in words[3]
        assert "neither its current batch nor its epoch" in words[4] and "leave it out" in words[5]


def evaluated_inside():
    """Training batches that are only repeated, around evaluations of the same length."""
    train, one, two = distributed(*(DataLoader(Numbers(count), 1) for count in (3, 6, 7)))
    found = []
    for x in train:
        kept = []
        for loader in (one, two):
            for rows in loader:
                found += sherd.gather(rows).tolist()
            kept.append(torch.cat(list(loader)))
        assert [sorted(sherd.gather(rows).tolist()) for rows in kept] == [list(range(6)), list(range(7))]
        assert sherd.mean(float(x)) == (0.5 if int(x) < 2 else 2.0)
    return found, sherd.gather(torch.zeros(1), rows=False).shape[0]


def test_the_innermost_loop_is_meant(ranks):
    assert ranks(2).run(evaluated_inside) == [([*range(6), *range(7)] * 2, 2)] * 2


def left_at_the_last_batch():
    gc.collect()  # loaders of earlier runs in this process could be meant too, as long as they live
    (loader,) = distributed(DataLoader(Numbers(5), 1))
    found = []
    for leave in (False, True):
        kept = []
        for rows in loader:
            kept.append(rows)
            if leave and len(kept) == 3:
                break
        found.append(sorted(sherd.gather(torch.cat(kept)).tolist()))
    kept = []
    for rows in loader:
        kept.append(rows)
        if len(kept) == len(loader):
            found.append(sorted(sherd.gather(torch.cat(kept)).tolist()))
            assert sherd.gather(rows, rows=False).tolist() == [4, 4]
    return found


def test_rows_of_an_epoch_wherever_it_was_left(ranks):
    assert ranks(2).run(left_at_the_last_batch) == [[[0, 1, 2, 3, 4]] * 3] * 2


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return (x.double() * self.weight).mean()


def left_with_workers():
    """The iterator of an evaluation that was left lives on in its loader, for its workers."""
    model = Weight()
    options = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": True}
    train, evaluated = distributed(DataLoader(Numbers(6), 1), DataLoader(Numbers(1), 1, **options), model=model)
    gradients = []
    for x in train:
        for rows in evaluated:
            assert sherd.gather(rows).tolist() == [0]
            break
        assert batch_weight.current() == 1.0 and sherd.mean(float(x)) == sum(sherd.gather(x, loader=train)) / 2
        model(x).backward()
        gradients.append(model.weight.grad.item())
        model.zero_grad()
    workers = [worker.pid for worker in evaluated._iterator._workers]
    assert [rows.tolist() for rows in evaluated] == [[0]]
    assert [worker.pid for worker in iter(evaluated)._workers] == workers
    return gradients


def test_an_evaluation_that_was_left_weighs_nothing(ranks):
    assert ranks(2).run(left_with_workers) == [[0.5, 2.5, 4.5]] * 2


def structures():
    made = torch.ones((), requires_grad=True) * 2
    found = sherd.gather({"loss": made, "rows": torch.ones(2), "more": [made]})
    return [each["loss"].item() for each in found]


def test_scalars_inside_structures_leave_their_graph_behind(ranks):
    assert ranks(2).run(structures) == [[2.0, 2.0]] * 2


@pytest.mark.fake
def test_a_prefetching_loop_keeps_both_passes():
    """Two passes over one loader: the one that yielded last is meant."""
    (loader,) = distributed(DataLoader(Numbers(5), 2))
    first, second = iter(loader), iter(loader)
    assert [len(next(each)) for each in (first, second, second, second)] == [2, 2, 2, 1]
    assert batch_weight.batches(loader) == [(1, 1)] and batch_weight.total(loader) == (5, 5)
    assert [len(rows) for rows in itertools.chain(first)] == [2, 1]
