"""A sharded loader: together the ranks see what one process sees, in the same order."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import pickle

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import sherd
from sherd import CommOptions, ConfigError, Diverged, LoaderOptions, comm
from sherd.data import batch_weight
from tests.helpers.loaders import Backwards, Buckets, Numbers, Stream, counted, epoch, sharded
from tests.helpers.training import connected, distributed, network, sgd

pytestmark = pytest.mark.fake

BATCH = 3  # per rank


class NumpyPermutation(Backwards):
    def __iter__(self):
        return iter(numpy.random.default_rng(3).permutation(self.count))


class TensorPermutation(Backwards):
    def __iter__(self):
        yield from torch.randperm(self.count)


class AtOnce(Backwards):
    """Draws as soon as it is asked for an iterator."""

    def __iter__(self):
        return iter(torch.randperm(self.count).tolist())


class Names(Backwards):
    def __iter__(self):
        return (f"{n}" for n in range(self.count))


class Liar(Backwards):
    """Gives more than it says."""

    def __iter__(self):
        return iter(range(2 * self.count + 1))


# How a loader over n samples with batches of b is built, and whether it drops the end.
LOADERS = {
    "in order": lambda n, b: DataLoader(Numbers(n), b),
    "shuffled": lambda n, b: DataLoader(Numbers(n), b, shuffle=True),
    "shuffled by a generator": lambda n, b: DataLoader(Numbers(n), b, shuffle=True, generator=seeded()),
    "shuffled, the end dropped": lambda n, b: DataLoader(Numbers(n), b, shuffle=True, drop_last=True),
    "with replacement": lambda n, b: DataLoader(Numbers(n), b, sampler=RandomSampler(Numbers(n), replacement=True)),
    "weighted": lambda n, b: DataLoader(Numbers(n), b, sampler=WeightedRandomSampler([1.0] * (n - 1) + [9.0], n)),
    "a subset": lambda n, b: DataLoader(Numbers(n), b, sampler=SubsetRandomSampler(range(n // 2))),
    "own sampler": lambda n, b: DataLoader(Numbers(n), b, sampler=Backwards(n)),
    "a list": lambda n, b: DataLoader(Numbers(n), b, sampler=[0, *range(n)]),
    "numbers of numpy": lambda n, b: DataLoader(Numbers(n), b, sampler=NumpyPermutation(n)),
    "tensors": lambda n, b: DataLoader(Numbers(n), b, sampler=TensorPermutation(n)),
    "drawn at once": lambda n, b: DataLoader(Numbers(n), b, sampler=AtOnce(n)),
    "names": lambda n, b: DataLoader(Numbers(n), b, sampler=Names(n)),
    "more than it says": lambda n, b: DataLoader(Numbers(n), b, sampler=Liar(n // 2)),
    "explicit batch sampler": lambda n, b: DataLoader(
        Numbers(n), batch_sampler=BatchSampler(RandomSampler(Numbers(n)), b, drop_last=True)
    ),
    "workers": lambda n, b: DataLoader(Numbers(n), b, shuffle=True, num_workers=2, multiprocessing_context="fork"),
}


def seeded():
    return torch.Generator().manual_seed(11)


def three_epochs(count, name):
    """The first two, one of them left in the middle, and a third; rank 0 alone has the seed that counts."""
    with connected() as c:
        torch.manual_seed(5 + c.rank)
        loader = sharded(LOADERS[name](count, BATCH), c)
        found = [epoch(loader)]
        found.append([(batch.tolist(), batch_weight.current()) for batch in itertools.islice(loader, 1)])
        found.append(epoch(loader))
        assert batch_weight.current() == 1.0
        return found, len(loader), int(torch.randint(1000, ())) if c.rank == 0 else None


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize(("world", "count"), [(2, 12), (3, 20)])
def test_the_order_is_that_of_one_process(ranks, name, world, count):
    torch.manual_seed(5)
    plain = LOADERS[name](count, world * BATCH)
    expected = [[batch.tolist() for batch in plain]]
    expected.append([batch.tolist() for batch in itertools.islice(plain, 1)])
    expected.append([batch.tolist() for batch in plain])
    after = int(torch.randint(1000, ()))
    by_rank, lengths, draws = zip(*ranks(world).run(three_epochs, count, name), strict=True)
    assert [counted(epochs) for epochs in zip(*by_rank, strict=True)] == expected
    assert set(lengths) == {len(plain)}
    assert draws[0] == after  # rank 0 drew from torch's random numbers as one process does


def alike():
    with connected() as c:
        torch.manual_seed(1)
        loader = sharded(DataLoader(Numbers(10), 2, shuffle=True), c)
        for _ in range(2):
            epoch(loader)
        return torch.get_rng_state()


def test_ranks_that_were_seeded_alike_stay_alike(ranks):
    first, second = ranks(2).run(alike)
    assert torch.equal(first, second)


def twin(world_of_one):
    """A script, but for the line that distributes."""
    torch.manual_seed(0)
    loader = DataLoader(Numbers(11), 4 if world_of_one else 2, shuffle=True)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    if not world_of_one:
        sherd.distribute(model, optimizer, loader, strategy="zero2")
    return [[(batch.tolist(), batch_weight.current()) for batch in loader] for _ in range(2)]


def test_a_script_and_its_distributed_twin_see_the_same_samples(ranks):
    plain = [[batch for batch, _ in each] for each in twin(world_of_one=True)]
    assert [counted(by_rank) for by_rank in zip(*ranks(2).run(twin, False), strict=True)] == plain


def every_size():
    found = []
    with connected() as c:
        for count, drop_last in itertools.product(range(1, 14), (False, True)):
            loader = sharded(DataLoader(Numbers(count), 2, drop_last=drop_last), c)
            found.append((count, drop_last, epoch(loader), len(loader)))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_every_length_is_dealt_once_and_in_as_many_iterations_on_every_rank(ranks, world):
    for cases in zip(*ranks(world).run(every_size), strict=True):
        count, drop_last, _, length = cases[0]
        plain = DataLoader(Numbers(count), 2 * world, drop_last=drop_last)
        assert counted([hands for _, _, hands, _ in cases]) == [batch.tolist() for batch in plain]
        assert length == len(plain)


def one_at_a_time():
    with connected() as c:
        torch.manual_seed(2)
        loader = sharded(DataLoader(Numbers(5), batch_size=None, sampler=AtOnce(5)), c)
        return epoch(loader), len(loader)


def test_without_a_batch_size_samples_are_dealt_one_by_one(ranks):
    torch.manual_seed(2)
    plain = [int(sample) for sample in DataLoader(Numbers(5), batch_size=None, sampler=AtOnce(5))]
    by_rank, lengths = zip(*ranks(2).run(one_at_a_time), strict=True)
    assert counted(by_rank) == [plain[0:2], plain[2:4], plain[4:]] and lengths == (3, 3)
    assert [counts for _, counts in by_rank[1]] == [1.0, 1.0, 0.0]


def own_batches():
    with connected() as c:
        torch.manual_seed(4 + c.rank)
        loader = sharded(DataLoader(Numbers(10), batch_sampler=Buckets([1, 2, 4, 3])), c)
        return epoch(loader), len(loader)


@pytest.mark.parametrize("world", [2, 3])
def test_batches_of_the_users_own_batch_sampler_are_kept(ranks, world):
    torch.manual_seed(4)
    plain = [batch.tolist() for batch in DataLoader(Numbers(10), batch_sampler=Buckets([1, 2, 4, 3]))]
    by_rank, lengths = zip(*ranks(world).run(own_batches), strict=True)
    seen = [batch for hands in zip(*by_rank, strict=True) for batch, counts in hands if counts]
    assert seen == plain and set(lengths) == {-(-4 // world)}
    first = [hands[0][1] for hands in by_rank]
    assert first == pytest.approx([rows * world / sum([1, 2, 4][:world]) for rows in [1, 2, 4][:world]])


def kept(count):
    with connected() as c:
        torch.manual_seed(c.rank)
        sampler = DistributedSampler(Numbers(count), c.world, c.rank, seed=7)
        loader = DataLoader(Numbers(count), 2, sampler=sampler)
        expected = [batch.tolist() for batch in loader]
        sharded(loader, c)
        assert epoch(loader) == [(batch, 1.0) for batch in expected]
        assert loader.sampler is sampler and len(loader) == len(expected)
        sampler.set_epoch(1)
        assert epoch(loader) != [(batch, 1.0) for batch in expected]


def test_a_distributed_sampler_of_the_users_own_is_respected(ranks):
    ranks(2).run(kept, 7)


class Mine(Backwards):
    """Distributed by itself, without padding."""

    def __init__(self, count, c):
        super().__init__(len(range(c.rank, count, c.world)))
        self.num_replicas, self.rank = c.world, c.rank

    def __iter__(self):
        return iter(range(self.rank, self.count * self.num_replicas, self.num_replicas))


def unpadded(count):
    with connected() as c:
        return epoch(sharded(DataLoader(Numbers(count), 2, sampler=Mine(count, c)), c))


def test_one_that_gives_ranks_different_lengths_hangs_nobody(ranks):
    even, odd = ranks(2).run(unpadded, 9)
    assert even == [([0, 2], 1.0), ([4, 6], 1.0), ([8], 2.0)]
    assert odd == [([1, 3], 1.0), ([5, 7], 1.0), ([5, 7], 0.0)]
    even, odd = ranks(2).run(unpadded, 7)
    assert [counts for _, counts in even] == pytest.approx([1.0, 4 / 3])
    assert [counts for _, counts in odd] == pytest.approx([1.0, 2 / 3])


def pairs_of_loaders():
    with connected() as c:
        outer, inner = (sharded(DataLoader(Numbers(n), 2), c) for n in (5, 7))
        found = []
        for batch in outer:
            before = batch_weight.current()
            assert len(epoch(inner)) == 2  # which ends with a share of its own
            found.append((batch.tolist(), before))
            assert batch_weight.current() == before
        assert found == epoch(outer)
        both = [(a.tolist(), b.tolist()) for a, b in zip(outer, inner, strict=False)]
        assert both == [(a, b) for (a, _), (b, _) in zip(epoch(outer), epoch(inner), strict=False)]
        first, second = iter(outer), iter(outer)
        next(first)
        assert [next(second).tolist() for _ in range(2)][1] == next(first).tolist()
        del first, second
        assert batch_weight.current() == 1.0


def test_loaders_may_be_nested_and_interleaved(ranks):
    ranks(2).run(pairs_of_loaders)


class Chatty(DataLoader):
    """A loader class of the user's own."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch + 100


class Strange(DataLoader):
    """One that does not ask for its indices where torch does."""

    def _get_iterator(self):
        iterator = super()._get_iterator()
        iterator._sampler_iter = map(list, iterator._sampler_iter)
        return iterator


def doubled(samples):
    return torch.stack(samples) * 2


def the_object():
    with connected() as c:
        loader = Chatty(Numbers(5), 2, collate_fn=doubled)
        model = network()
        found = sherd.distribute(model, sgd(model), loader, comm=c)
        assert found[2] is loader and type(loader).__name__ == "Chatty" and isinstance(loader, Chatty)
        assert loader.batch_size == 2 and not loader.drop_last and type(loader.sampler) is SequentialSampler
        generator = loader.generator = seeded()
        assert loader.generator is generator
        plain = [[100, 102, 104, 106], [108]]
        mine = [batch for batch, _ in epoch(loader)]
        assert mine == [plain[0][2 * c.rank :][:2], plain[1]]
        for twin in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader)), copy.copy(loader)):
            assert type(twin) is Chatty and len(twin) == 3
            assert [batch for batch, _ in epoch(twin)] == [[100, 102], [104, 106], [108]]
            sharded(twin, c)
            assert epoch(twin) == epoch(loader)


def test_it_stays_the_users_object(ranks):
    ranks(2).run(the_object)


def batch_sizes():
    with connected() as c:
        loader = sharded(DataLoader(Numbers(40), 1), c, accumulate=2, global_batch=12)
        assert loader.batch_size == loader.batch_sampler.batch_size == 3 and len(loader) == 7
        explicit = DataLoader(Numbers(40), batch_sampler=BatchSampler(range(40), 5, drop_last=True))
        sharded(explicit, c, global_batch=12)
        assert len(explicit) == 3 and {len(batch) for batch, _ in epoch(explicit)} == {6}
        for wrong, right in ((13, "global_batch=12 or global_batch=16"), (3, "write global_batch=4")):
            with pytest.raises(ConfigError, match=right):
                sharded(DataLoader(Numbers(40), 1), c, accumulate=2, global_batch=wrong)
        for unset in (
            DataLoader(Numbers(4), batch_size=None),
            DataLoader(Numbers(4), batch_sampler=Buckets([2, 2])),
        ):
            with pytest.raises(ConfigError, match="cannot set the batch size"):
                sharded(unset, c, global_batch=4)


def test_a_global_batch_sets_the_batch_size_of_a_rank(ranks):
    ranks(2).run(batch_sizes)


def equations():
    with connected() as c, contextlib.redirect_stderr(io.StringIO()) as printed:
        for accumulate in (1, 2):
            model = network()
            loader = DataLoader(Numbers(40), 8)
            sherd.distribute(model, sgd(model), loader, comm=c, accumulate=accumulate)
    return printed.getvalue()


def test_the_batch_equation_is_printed_once(ranks):
    assert ranks(2).run(equations) == [
        "sherd: global 16 = 2 ranks x 8\nsherd: global 32 = 2 ranks x 8 x accumulate 2\n",
        "",
    ]


def test_a_world_of_one_leaves_the_loader_alone(capsys):
    with comm.connect(CommOptions()) as c:
        loader = DataLoader(Numbers(5), 2, shuffle=True)
        assert distributed(c, "ddp")
        model = network()
        sherd.distribute(model, sgd(model), loader, comm=c)
        assert isinstance(loader, DataLoader) and capsys.readouterr().err == "sherd: global 2 = 1 rank x 2\n"
        with pytest.raises(ConfigError, match="already distributed"):
            sharded(loader, c)
        assert type(copy.deepcopy(loader)) is DataLoader
        large = sharded(DataLoader(Numbers(5), 2), c, accumulate=2, global_batch=8)
        assert large.batch_size == 4 and [len(batch) for batch in large] == [4, 1]


def as_batches(rows):
    """A batch that says nothing of how many samples are in it."""
    return {"rows": [int(row) for row in rows]}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"batch_size": 2, "shuffle": True}, [2, 2, 1]),
        ({"batch_size": 2, "collate_fn": as_batches}, [2, 2, 1]),
        ({"batch_size": 2, "shuffle": True, "num_workers": 2, "persistent_workers": True}, [2, 2, 1]),
        ({"batch_size": 2, "num_workers": 2, "in_order": False, "drop_last": True}, [2, 2]),
        ({"batch_size": None, "sampler": AtOnce(5)}, [1] * 5),
        ({"batch_sampler": [[0], [1, 2, 3]]}, [1, 3]),
        ({"batch_size": None, "sampler": ["0", "11", "222"]}, [1] * 3),
    ],
)
def test_a_world_of_one_counts_batches_and_changes_none(options, counts):
    found = []
    for led in (False, True):
        torch.manual_seed(3)
        loader = DataLoader(Numbers(5), **options)
        with comm.connect(CommOptions()) as c:
            if led:
                sharded(loader, c)
            for _ in range(2):
                epoch = []
                for batch in loader:
                    epoch.append(repr(batch))
                    if led:
                        assert batch_weight.samples() == counts[len(epoch) - 1]
                if led:
                    assert len(loader) == len(counts) and batch_weight.total(loader) == (sum(counts), sum(counts))
                in_order = loader.in_order or not loader.num_workers
                found.append(
                    (epoch if in_order else sorted(epoch), torch.initial_seed(), torch.get_rng_state().tolist())
                )
    assert found[:2] == found[2:]


def test_a_stream_in_a_world_of_one_is_counted_by_rows():
    with comm.connect(CommOptions()) as c:
        loader = sharded(DataLoader(Stream(5), 2), c)
        assert [(len(batch), batch_weight.samples()) for batch in loader] == [(2, 2), (2, 2), (1, 1)]


def counts_of_uneven_ends():
    with connected() as c:
        found = []
        for count in (5, 6, 7, 8):
            loader = sharded(DataLoader(Numbers(count), 2), c)
            found.append([batch_weight.batches()[0] for _ in loader])
            assert batch_weight.total(loader) == tuple(map(sum, zip(*found[-1], strict=True)))
        return found


def test_repeated_samples_are_not_counted(ranks):
    by_rank = ranks(3).run(counts_of_uneven_ends)
    assert [sum(batch.counted for rank in by_rank for batch in rank[index]) for index in range(4)] == [5, 6, 7, 8]
    assert by_rank[1][2] == [(2, 2), (1, 0)]  # the seventh sample is rank 0's; the others load it too


def refusals():
    with connected() as c:
        for thing in ([1, 2], (n for n in range(3)), Numbers(3)):
            with pytest.raises(ConfigError, match=r"pass a torch\.utils\.data\.DataLoader, or leave it out"):
                sharded(thing, c)
        with pytest.raises(ConfigError, match="already distributed"):
            sharded(sharded(DataLoader(Numbers(4)), c), c)
        with pytest.raises(ConfigError, match="write in_order=True"):
            sharded(DataLoader(Numbers(4), num_workers=1, in_order=False), c)
        for replicas, rank, text in ((3, c.rank, "num_replicas=3 where there are 2"), (2, 0, r"rank=\[0, 0\]")):
            with pytest.raises(ConfigError, match=text):
                sharded(DataLoader(Numbers(4), sampler=DistributedSampler(Numbers(4), replicas, rank)), c)
        with pytest.raises(Diverged, match="rank 0's has samples=4 where rank 1's has samples=5"):
            sharded(DataLoader(Numbers(4 + c.rank)), c)
        with pytest.raises(Diverged, match="rank 0's has batch_size=1 where rank 1's has batch_size=2"):
            sharded(DataLoader(Numbers(4), 1 + c.rank), c)
        with pytest.raises(ConfigError, match="draws indices by itself"):
            iter(sharded(Strange(Numbers(4)), c))
        model = network()
        with pytest.raises(ConfigError, match="about a loader"):
            sherd.distribute(model, sgd(model), comm=c, global_batch=4)
        assert len(sharded(DataLoader(Numbers(4), 1, num_workers=1, in_order=False, drop_last=True), c)) == 2


def test_what_cannot_be_right_is_refused(ranks):
    ranks(2).run(refusals)


def test_options_are_checked():
    with pytest.raises(ConfigError, match="did you mean 'split'"):
        LoaderOptions(iterable="splt")
    with pytest.raises(ConfigError, match="at least 1"):
        LoaderOptions(global_batch=0)
    with pytest.raises(ConfigError, match="did you mean 'global_batch'"):
        sherd.distribute(network(), global_bach=3)
