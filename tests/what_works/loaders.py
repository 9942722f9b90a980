"""Cases of loaders that are passed to `distribute`: per-rank batches of half the size, the same training."""

from __future__ import annotations

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from tests.helpers.training import adamw, double, loss_of, weights
from tests.what_works.cases import case, refused

SECTION = "Loaders"
BATCH = 6  # of all ranks together
EPOCHS = 2


def _dataset(samples):
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(*(torch.randn(samples, n, generator=generator, dtype=torch.float64) for n in (15, 5)))


def _train(run, loader, epochs=EPOCHS, **options):
    """The plain loop over a loader that one process reads in whole batches and each rank in parts of them."""
    model = double()
    model, optimizer, loader = run.distribute(model, adamw(model), loader, **options)
    batches = 0
    for _ in range(epochs):
        for data in loader:
            loss_of(model, data).backward()
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
    assert batches == epochs * len(loader)
    return {**weights(model), "batches": torch.tensor(batches)}


def _loader(run, samples, **options):
    return DataLoader(_dataset(samples), BATCH // run.world, **options)


@case(
    SECTION, "`DataLoader(dataset, batch_size)`", "the ranks' batches are together those of one process, in its order"
)
def in_order(run):
    return _train(run, _loader(run, 18))


@case(SECTION, "`shuffle=True` after `torch.manual_seed`", "the order of one process, anew in each epoch")
def shuffled(run):
    torch.manual_seed(3)
    return _train(run, _loader(run, 18, shuffle=True))


@case(SECTION, "`shuffle=True, generator=...`", "the same")
def with_generator(run):
    return _train(run, _loader(run, 18, shuffle=True, generator=torch.Generator().manual_seed(5)))


@case(SECTION, "A last batch that is smaller", "dealt as evenly as can be, and every sample counts the same")
def uneven(run):
    return _train(run, _loader(run, 15, shuffle=True, generator=torch.Generator().manual_seed(5)))


@case(SECTION, "A last batch of fewer samples than ranks", "a rank without one repeats a sample, which weighs 0")
def fewer_than_ranks(run):
    return _train(run, _loader(run, 13))


@case(SECTION, "`drop_last=True`", "drops what one process would")
def dropped(run):
    return _train(run, _loader(run, 16, drop_last=True))


@case(SECTION, "`global_batch=6`", "the batch of all ranks together, whatever the loader's own")
def global_batch(run):
    if run.plain:
        return _train(run, _loader(run, 15))
    return _train(run, DataLoader(_dataset(15), 1), global_batch=BATCH)


@case(SECTION, "`accumulate=2` with a loader", "as one process that reads twice the batch")
def accumulated(run):
    if not run.plain:
        model = double()
        loader = DataLoader(_dataset(12), 1)
        options = {"accumulate": 2, "accumulate_at": "owner", "global_batch": 4}
        model, optimizer, loader = run.distribute(model, adamw(model), loader, **options)
    else:
        model = double()
        optimizer, loader = adamw(model), DataLoader(_dataset(12), 4)
    for data in loader:
        loss_of(model, data).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case(SECTION, "Samplers of torch's and of your own", "`WeightedRandomSampler`: rank 0's order is everybody's")
def weighted_sampler(run):
    generator = torch.Generator().manual_seed(5)
    sampler = WeightedRandomSampler(torch.arange(1.0, 16.0), 20, generator=generator)
    return _train(run, DataLoader(_dataset(15), BATCH // run.world, sampler=sampler))


class Pairs(BatchSampler):
    """Batches of a user's own making: of 2, of 4, of 2, ..."""

    def __init__(self, samples):
        super().__init__(SequentialSampler(range(samples)), 2, False)
        self.batches = [list(range(start, start + 2)) for start in range(0, samples, 2)]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


@case(
    SECTION,
    "`RandomSampler(dataset, replacement=True, num_samples=10**10)`, and `break`",
    "begins at once: the order is agreed on in pieces",
)
def counted_in_steps(run):
    dataset = _dataset(15)
    return _train_steps(run, dataset, RandomSampler(dataset, replacement=True, num_samples=10**10, generator=_seeded()))


class Endless(Sampler):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        generator = _seeded()
        while True:
            yield from torch.randperm(self.samples, generator=generator).tolist()


@case(SECTION, "A sampler without an end or a `len()`, and `break`", "its order on rank 0 is dealt")
def endless(run):
    return _train_steps(run, _dataset(15), Endless(15))


def _seeded():
    return torch.Generator().manual_seed(5)


def _train_steps(run, dataset, sampler, steps=4):
    """A loop that leaves its only epoch."""
    model = double()
    loader = DataLoader(dataset, BATCH // run.world, sampler=sampler)
    model, optimizer, loader = run.distribute(model, adamw(model), loader)
    for step, data in enumerate(loader):
        if step == steps:
            break
        loss_of(model, data).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case(SECTION, "A `batch_sampler` of your own", "its batches stay as they are, and are dealt in turn")
def own_batches(run):
    if run.plain:
        return _train(run, DataLoader(_dataset(12), 4))
    return _train(run, DataLoader(_dataset(12), batch_sampler=Pairs(12)))


@case(SECTION, "A `DistributedSampler` of your own", "is respected: the loader is left alone")
def distributed_sampler(run):
    if run.plain:  # what the samplers of two ranks give together
        order = [index for start in range(0, 12, 6) for rank in range(2) for index in range(start + rank, start + 6, 2)]
        return _train(run, DataLoader(_dataset(12), BATCH, sampler=order))
    sampler = DistributedSampler(_dataset(12), run.world, run.rank, shuffle=False)
    return _train(run, DataLoader(_dataset(12), BATCH // run.world, sampler=sampler))


def _collate(samples):
    x, y = zip(*samples, strict=True)
    return torch.stack(x) * 2, torch.stack(y)


@case(SECTION, "`collate_fn`, `num_workers`, `persistent_workers`", "stay torch's own")
def workers(run):
    options = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
    return _train(run, _loader(run, 15, collate_fn=_collate, **options))


class Squares(Dataset):
    """Samples that come without batches."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return tuple(torch.randn(3, n, generator=generator, dtype=torch.float64) for n in (15, 5))


@case(SECTION, "`batch_size=None`", "the dataset makes the batches; they are dealt in turn")
def without_batches(run):
    if run.plain:
        items = [Squares()[index] for index in range(8)]
        whole = [tuple(torch.cat(pair) for pair in zip(*items[i : i + 2], strict=True)) for i in range(0, 8, 2)]
        return _train(run, DataLoader(whole, batch_size=None))
    return _train(run, DataLoader(Squares(), batch_size=None))


class Stream(IterableDataset):
    """A stream, whole or one rank's part of it."""

    def __init__(self, indices):
        self.indices = list(indices)

    def __iter__(self):
        return iter([_dataset(32)[index] for index in self.indices])

    def __len__(self):
        return len(self.indices)


@case(
    SECTION, 'An `IterableDataset`, `iterable="split"`', "every rank reads the stream and takes its part of the batches"
)
def split(run):
    options = {} if run.plain else {"iterable": "split"}
    return _train(run, DataLoader(Stream(range(18)), BATCH // run.world), **options)


@case(
    SECTION,
    'An `IterableDataset`, `iterable="sharded"`',
    "every rank reads its own; one that runs out early waits, weighing nothing, for the others",
)
def sharded(run):
    model = double()
    if run.plain:
        parts = [[0, 1, 2, 20, 21, 22], [3, 4, 5, 23, 24], [6, 7, 8]]
        loader = DataLoader(_dataset(32), batch_sampler=parts)
        model, optimizer = run.distribute(model, adamw(model))
    else:
        own = range(9) if run.rank == 0 else range(20, 25)
        model, optimizer, loader = run.distribute(
            model, adamw(model), DataLoader(Stream(own), BATCH // run.world), iterable="sharded"
        )
    for data in loader:
        loss_of(model, data).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


class Failing(Dataset):
    """Its fourth sample cannot be read."""

    def __len__(self):
        return 13

    def __getitem__(self, index):
        if index == 3:
            raise OSError("no such sample")
        return _dataset(13)[index]


@case(
    SECTION,
    "A batch that cannot be read, caught by the loop",
    "on every rank alike; the next ones count what they should",
)
def failing(run):
    model = double()
    model, optimizer, loader = run.distribute(model, adamw(model), DataLoader(Failing(), BATCH // run.world))
    batches = iter(loader)
    while True:
        try:
            data = next(batches)
        except OSError:
            data = None
        except StopIteration:
            break
        lost = run.mean(torch.tensor(float(data is None))) > 0
        if not lost:
            loss_of(model, data).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


@case(SECTION, "A loader that is not passed", "is each rank's own")
def not_passed(run):
    model = double()
    model, optimizer = run.distribute(model, adamw(model))
    loader = DataLoader(_dataset(18), BATCH)
    for x, y in loader:
        loss_of(model, (run.rows(x), run.rows(y))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case(SECTION, "Two loaders", "each is sharded; leaving one in the middle of an epoch does no harm")
def two_loaders(run):
    model = double()
    first, second = (_loader(run, samples) for samples in (15, 13))
    model, optimizer, first, second = run.distribute(model, adamw(model), first, second)
    for _ in range(2):
        for data in first:
            loss_of(model, data).backward()
            optimizer.step()
            optimizer.zero_grad()
            break
        for data in second:
            loss_of(model, data).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


@refused(
    SECTION,
    "An `IterableDataset` without `iterable=`",
    'only the user knows whether it gives each rank the same: write `iterable="split"` or `iterable="sharded"`',
    match=r'iterable="split".*iterable="sharded"',
)
def unspoken(run):
    _train(run, DataLoader(Stream(range(6)), 2))


@refused(
    SECTION,
    "A `global_batch` that cannot be dealt evenly",
    "the nearest that can are named",
    match=r"global_batch=7 .*global_batch=6 or global_batch=8",
)
def odd_batch(run):
    _train(run, _loader(run, 12), global_batch=7)


@refused(
    SECTION,
    "A `DistributedSampler` for another number of ranks",
    "give it the number that there is, or leave it out",
    match="num_replicas=3 where there are 2 ranks",
)
def wrong_replicas(run):
    sampler = DistributedSampler(_dataset(12), 3, run.rank)
    _train(run, DataLoader(_dataset(12), 2, sampler=sampler))


@refused(
    SECTION,
    "A `random_split` that differs between the ranks",
    "samples would come twice and held-out ones be trained on: give it a generator with a fixed seed",
    match=r"chose different samples \(give random_split a generator with a fixed seed\)",
)
def other_split(run):
    torch.manual_seed(run.rank)
    chosen, _ = random_split(_dataset(12), [8, 4])
    _train(run, DataLoader(chosen, 2))


@refused(
    SECTION,
    "Data that is no `DataLoader`",
    "it stays outside: give each rank its own",
    match="found an object of type list",
)
def no_loader(run):
    model = double()
    run.distribute(model, adamw(model), [1, 2])
