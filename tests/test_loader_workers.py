"""Workers of a sharded loader: they have seeds of their own, and whatever starts or ends them does no harm."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from tests.loader_helpers import Numbers, Pairs, Seeds, epoch, sharded
from tests.training_helpers import close, connected, double, sgd, train, weights
from torch.utils.data import DataLoader

import sherd
from sherd.data import share


def seeds():
    """Worker, seed and what was drawn, by epoch."""
    with connected() as c:
        torch.manual_seed(0)
        loader = sharded(DataLoader(Seeds(8), 1, num_workers=2, multiprocessing_context="fork"), c)
        found = [[tuple(map(int, batch)) for batch in loader] for _ in range(2)]
        torch.manual_seed(0)
        assert [tuple(map(int, batch)) for batch in loader] == found[0]  # from the seed, and from nothing else
        return found


def test_seeds_depend_on_rank_epoch_and_worker(ranks):
    by_rank = ranks(2).run(seeds)
    owners = {}
    for (rank, epochs), number in itertools.product(enumerate(by_rank), range(2)):
        for worker, seed, _ in epochs[number]:
            owners.setdefault(seed, set()).add((rank, number, worker))
        first = [seed - worker for worker, seed, _ in epochs[number]]
        assert len(set(first)) == 1  # torch's own rule holds inside a rank
    assert len(owners) == 2 * 2 * 2 and all(len(owner) == 1 for owner in owners.values())
    drawn = [draw for epochs in by_rank for batches in epochs for _, _, draw in batches]
    assert len(set(drawn)) == len(drawn)


def busy(worker):
    """What a worker may do to objects that it inherited: collect them, and end."""
    gc.collect()


def trained(method, workers, persistent, strategies, transport):
    options = {"num_workers": workers, "multiprocessing_context": method, "persistent_workers": persistent}
    with connected(transport) as c:
        for strategy in strategies:
            plain, model = double(), double()
            reference, optimizer = sgd(plain), sgd(model)
            # Persistent workers get their seed once, so the order of later epochs depends on them in plain torch too.
            alike = {**options, "multiprocessing_context": "fork"} if persistent else {}
            whole = DataLoader(Pairs(9), 4, shuffle=True, **alike)
            torch.manual_seed(6)
            for _ in range(2):
                train(plain, reference, whole)
            loader = DataLoader(Pairs(9), 2, shuffle=True, worker_init_fn=busy, **options)
            sherd.distribute(model, optimizer, loader, strategy=strategy, comm=c)
            torch.manual_seed(6)
            for _ in range(2):
                train(model, optimizer, loader)
            close(weights(model), weights(plain), strategy)
            assert share.current() == 1.0
            del loader, whole
            gc.collect()  # workers end here at the latest
            assert c.all_gather_object(c.rank) == list(range(c.world))  # everybody is still there


@pytest.mark.parametrize(
    ("persistent", "strategies", "transport"),
    [(False, ("ddp", "zero3"), "host"), (True, ("zero1",), "host"), (False, ("zero2",), "c10d")],
)
def test_training_with_forked_workers(ranks, persistent, strategies, transport):
    ranks(2).run(trained, "fork", 2, persistent, strategies, transport)


def test_training_with_spawned_workers(ranks):
    ranks(2).run(trained, "spawn", 1, True, ["zero2"], "host")


def kept_workers():
    """Workers of an epoch that was left in the middle serve the next one."""
    with connected() as c:
        loader = DataLoader(Numbers(7), 1, num_workers=2, multiprocessing_context="fork", persistent_workers=True)
        assert [int(n) for n in loader] == list(range(7))  # plain, with workers that stay
        sharded(loader, c)
        whole = epoch(loader)
        assert [batch for batch, _ in whole] == [[n + c.rank] for n in (0, 2, 4)] + [[6]]
        assert [counts for _, counts in whole] == [1.0, 1.0, 1.0, 2.0 if c.rank == 0 else 0.0]
        iterator = iter(loader)
        workers = [worker.pid for worker in iterator._workers]
        next(iterator)
        assert epoch(loader) == whole
        assert [worker.pid for worker in loader._iterator._workers] == workers
        assert share.current() == 1.0


def test_persistent_workers_are_kept(ranks):
    ranks(2).run(kept_workers)
