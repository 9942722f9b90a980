"""Workers of a sharded loader: they have seeds of their own, and whatever starts or ends them does no harm."""

from __future__ import annotations

import gc
import itertools
import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader

import sherd
from sherd import PeerLost
from sherd.data import batch_weight
from tests.helpers.loaders import Numbers, Pairs, Seeds, counted, epoch, sharded
from tests.helpers.training import close, connected, double, sgd, train, weights


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
            assert batch_weight.current() == 1.0
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


def different_numbers():
    """Hosts need not be alike: how far ahead a rank draws is its own business."""
    with connected() as c:
        torch.manual_seed(3)
        options = {"num_workers": 2, "multiprocessing_context": "fork"} if c.rank else {}
        loader = sharded(DataLoader(Numbers(9), 1, shuffle=True, **options), c)
        found = []
        for batch in loader:
            found.append((batch.tolist(), batch_weight.current()))
            c.barrier().wait()  # the exchange of a step
        return found


def test_ranks_may_have_different_numbers_of_workers(ranks):
    torch.manual_seed(3)
    plain = [batch.tolist() for batch in DataLoader(Numbers(9), 2, shuffle=True)]
    assert counted(ranks(2).run(different_numbers)) == plain


def killed():
    with connected() as c:
        loader = sharded(DataLoader(Numbers(40), 1, num_workers=2, multiprocessing_context="fork"), c)
        batches = iter(loader)
        next(batches)
        if c.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost, match=r"rank 1 .* was killed by SIGKILL"):
            c.barrier().wait()
    return "survived"


def test_workers_do_not_hide_that_their_rank_is_gone(ranks):
    assert ranks(2).run(killed, expected_exits={1: -signal.SIGKILL})[0] == "survived"


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
        assert batch_weight.current() == 1.0


def test_persistent_workers_are_kept(ranks):
    ranks(2).run(kept_workers)
