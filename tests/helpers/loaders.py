"""Datasets, samplers and loops for tests of loaders."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from sherd import LoaderOptions
from sherd.data import batch_weight, shard


class Numbers(Dataset):
    """Sample i is the number i."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor(int(index))


class Pairs(Numbers):
    """Sample i is what tests train on."""

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(int(index))
        return tuple(torch.randn(n, generator=generator, dtype=torch.float64) for n in (15, 5))


class Seeds(Numbers):
    """Sample i is the seed of the worker that loads it, and a number drawn there."""

    def __getitem__(self, index):
        info = get_worker_info()
        return info.id, info.seed, int(torch.randint(2**62, ()))


class Stream(IterableDataset):
    """`start, start + 1, ...`, `count` of them."""

    def __init__(self, count, start=0):
        self.count = count
        self.start = start

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (torch.tensor(self.start + n) for n in range(first, self.count, step))


class SizedStream(Stream):
    def __len__(self):
        return self.count


class PairStream(Stream):
    def __iter__(self):
        return (Pairs(0)[self.start + n] for n in range(self.count))


class Backwards(Sampler):
    """An ordinary sampler of the user's own, without random numbers."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(range(self.count - 1, -1, -1))


class Buckets(Sampler):
    """Batches of different sizes, drawn as soon as it is asked for an iterator."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __iter__(self):
        order = torch.randperm(sum(self.sizes)).tolist()
        return iter([[order.pop() for _ in range(size)] for size in self.sizes])


def sharded(loader, c, accumulate=1, **options):
    shard(loader, c, LoaderOptions(**options), accumulate)
    return loader


def epoch(loader):
    """Every batch, as a list, with its share."""
    return [(batch.tolist(), batch_weight.current()) for batch in loader]


def counted(by_rank):
    """What the ranks saw together in each iteration, without what was repeated."""
    together = []
    for hands in zip(*by_rank, strict=True):
        values = [batch if isinstance(batch, list) else [batch] for batch, counts in hands if counts]
        together.append([value for batch in values for value in batch])
        assert abs(sum(counts for _, counts in hands) - len(hands)) < 1e-12
    return together
