"""Loaders over an IterableDataset: split by us, or sharded by the dataset."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

import sherd
from sherd import ConfigError, SherdError
from sherd.data import batch_weight
from sherd.data.iterable import rows
from tests.helpers.loaders import PairStream, SizedStream, Stream, counted, epoch, sharded
from tests.helpers.training import STRATEGIES, close, connected, double, sgd, train, weights


def flat(batches):
    return [value for batch in batches for value in batch]


def split(count, batch, drop_last, workers):
    with connected() as c:
        options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        loader = DataLoader(SizedStream(count), batch, drop_last=drop_last, **options)
        sharded(loader, c, iterable="split")
        return epoch(loader), epoch(loader), len(loader)


@pytest.mark.parametrize(("world", "count"), [(2, 8), (2, 9), (2, 3), (3, 7), (3, 1)])
def test_a_whole_stream_is_split_batch_by_batch(ranks, world, count):
    plain = [batch.tolist() for batch in DataLoader(Stream(count), 2)]
    first, second, lengths = zip(*ranks(world).run(split, count, 2, False, 0), strict=True)
    assert first == second and set(lengths) == {len(first[0])}
    groups = [plain[start : start + world] for start in range(0, len(plain), world)]
    assert counted(first) == [flat(group) for group in groups]
    for group, hands in zip(groups, zip(*first, strict=True), strict=True):
        total = sum(map(len, group))
        expected = [len(batch) * world / total for batch in group] + [0.0] * (world - len(group))
        assert [counts for _, counts in hands] == expected


def test_drop_last_drops_what_is_not_enough_for_all_ranks(ranks):
    first, _, lengths = zip(*ranks(2).run(split, 7, 2, True, 0), strict=True)
    assert counted(first) == [[0, 1, 2, 3]] and lengths == (1, 1)


def test_workers_of_a_split_stream(ranks):
    first, second, _ = zip(*ranks(2).run(split, 12, 2, False, 2), strict=True)
    assert first == second
    assert sorted(flat(counted(first))) == list(range(12))


class Shuffled(Stream):
    def __iter__(self):
        yield from torch.randperm(self.count)


def shuffled_by_workers():
    with connected() as c:
        torch.manual_seed(c.rank)
        loader = DataLoader(Shuffled(12), 2, num_workers=1, multiprocessing_context="fork")
        return epoch(sharded(loader, c, iterable="split"))


def test_workers_that_shuffle_give_every_rank_the_same_stream(ranks):
    seen = flat(counted(ranks(2).run(shuffled_by_workers)))
    assert sorted(seen) == list(range(12)) != seen


def own_parts(counts, batch):
    with connected() as c:
        loader = DataLoader(Stream(counts[c.rank], start=100 * c.rank), batch)
        sharded(loader, c, iterable="sharded")
        found = epoch(loader)
        iterator = iter(loader)
        assert [(next(iterator).tolist(), batch_weight.current()) for _ in found] == found
        assert next(iterator, None) is None
        if c.rank == 0:  # when it is over it needs nobody to say so
            assert next(iterator, None) is None
        assert batch_weight.current() == 1.0
        return found


def test_a_rank_that_runs_out_early_repeats_its_last_batch_for_nothing(ranks):
    long, short = ranks(2).run(own_parts, (7, 3), 2)
    assert [batch for batch, _ in long] == [[0, 1], [2, 3], [4, 5], [6]]
    assert [batch for batch, _ in short] == [[100, 101], [102], [102], [102]]
    assert [counts for _, counts in long] == pytest.approx([1.0, 4 / 3, 2.0, 2.0])
    assert [counts for _, counts in short] == pytest.approx([1.0, 2 / 3, 0.0, 0.0])
    nothing = ranks(2).run(own_parts, (0, 0), 2)
    assert nothing == [[], []]


def nothing_at_all():
    with connected() as c:
        loader = sharded(DataLoader(Stream(0 if c.rank == 1 else 4), 2), c, iterable="sharded")
        with pytest.raises(SherdError, match=r"ranks \[1\] have no batch at all"):
            epoch(loader)


def test_a_rank_without_any_data_is_named_on_every_rank(ranks):
    ranks(2).run(nothing_at_all)


class Dicts(PairStream):
    def __iter__(self):
        return ({"x": x, "more": {"y": y}, "name": "n"} for x, y in super().__iter__())


def taking_apart():
    """A loop that takes things out of its batches finds them in a repeated one too."""
    with connected() as c:
        loader = sharded(DataLoader(Dicts(2 + 2 * c.rank), 2), c, iterable="sharded")
        for batch in loader:
            assert sorted(batch) == ["more", "name", "x"]
            batch.pop("x")


def test_a_repeated_batch_is_whole(ranks):
    ranks(2).run(taking_apart)


def training(iterable):
    with connected() as c:
        plain = double()
        reference = sgd(plain)
        if iterable == "split":
            everything = [list(DataLoader(PairStream(9), 2))[start : start + 2] for start in range(0, 5, 2)]
        else:
            parts = [list(DataLoader(PairStream(count, start), 2)) for count, start in ((5, 0), (3, 50))]
            everything = [[part[n] for part in parts if n < len(part)] for n in range(3)]
        together = [tuple(torch.cat(column) for column in zip(*group, strict=True)) for group in everything]
        train(plain, reference, together)
        for strategy in STRATEGIES:
            model = double()
            mine = PairStream(9) if iterable == "split" else PairStream(*((5, 0), (3, 50))[c.rank])
            optimizer, loader = sgd(model), DataLoader(mine, 2)
            sherd.distribute(model, optimizer, loader, strategy=strategy, comm=c, iterable=iterable)
            train(model, optimizer, loader)
            close(weights(model), weights(plain), strategy)


@pytest.mark.parametrize("iterable", ["split", "sharded"])
def test_training_is_that_of_one_process(ranks, iterable):
    ranks(2).run(training, iterable)


def refusals():
    with connected() as c:
        with pytest.raises(ConfigError, match=r'iterable="split".* the whole stream.*iterable="sharded"'):
            sharded(DataLoader(Stream(4)), c)
        with pytest.raises(ConfigError, match="sharding_filter"):
            sharded(DataLoader(IterableWrapper(range(4))), c, iterable="split")
        with pytest.raises(ConfigError, match="in_order=True"):
            sharded(DataLoader(Stream(4), num_workers=1, in_order=False), c, iterable="split")
        loader = sharded(DataLoader(Stream(8), 1), c, iterable="split", global_batch=4)
        assert loader.batch_size == 2 and {len(batch) for batch, _ in epoch(loader)} == {2}
        with pytest.raises(TypeError):
            len(loader)


def test_what_cannot_be_known_is_refused(ranks):
    ranks(2).run(refusals)


@pytest.mark.pure
def test_rows_are_those_of_the_first_tensor():
    x = torch.zeros(3, 2)
    for batch in (x, [x, 1], ("name", {"a": [x]}), {"n": 4, "x": x}):
        assert rows(batch) == 3
    for batch in (torch.tensor(4.0), "text", [], {"a": None}, 7):
        assert rows(batch) == 1
