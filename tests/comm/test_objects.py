"""Objects between ranks: plain data everywhere; pickles only from those whose they must be."""

from __future__ import annotations

import os
import pickle

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import sherd
from sherd import CommOptions, comm
from sherd.comm.trust.objects import PICKLED, ObjectCall
from sherd.comm.trust.seal import Seal
from sherd.errors import CommError, ConfigError, Diverged
from tests.helpers.hosts import on_hosts
from tests.helpers.training import STRATEGIES, batch, loss_of

SEAL = Seal(b"of the job")


class Own:
    """Of a class that is not plain data."""

    def __init__(self, rank):
        self.rank = rank


class Touch:
    """What a stranger would send: it leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


# ---------------------------------------------------------------- what is believed


def call(number=1, trusted=False, seal=SEAL, operation="all_gather_object", world=2):
    return ObjectCall(operation, number, world, trusted, seal)


@pytest.mark.pure
def test_a_pickle_goes_where_it_was_sealed_for_and_nowhere_else():
    packed = call().packed(Own(3), 1)
    assert call().unpacked([packed], [1])[0].rank == 3
    for other in (call(number=2), call(operation="broadcast_object"), call(world=3), call(seal=Seal(b"another"))):
        with pytest.raises(CommError, match=r"from rank 1 .* did not read it"):
            other.unpacked([packed], [1])
    with pytest.raises(CommError, match="from rank 0"):
        call().unpacked([packed], [0])
    with pytest.raises(CommError, match="neither plain data nor sealed"):
        call(seal=None).unpacked([packed], [1])


@pytest.mark.pure
def test_a_strangers_pickle_is_not_read(tmp_path):
    path = tmp_path / "ran"
    touch = pickle.dumps(Touch(str(path)))
    sealed = bytes(call(seal=Seal(b"a stranger's")).packed(Touch(str(path)), 0).tolist())
    for data in (PICKLED + touch, b"2" + touch, b"2" + bytes(32) + touch, b"0" + touch, b"3" + touch, touch, sealed):
        packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for seal in (SEAL, None):
            with pytest.raises(CommError):
                call(seal=seal).unpacked([packed], [0])
    with pytest.raises(CommError):
        call().unpacked([torch.empty(0, dtype=torch.uint8)], [0])
    assert not path.exists()
    call(trusted=True).unpacked([torch.frombuffer(bytearray(PICKLED + touch), dtype=torch.uint8)], [0])
    assert path.exists(), "it would have run where pickles are read"


# ---------------------------------------------------------------- over every transport


def refused(transport):
    """What cannot be sent is the same error on every rank, and calls go on."""
    words = []
    with comm.connect(CommOptions(transport=transport, timeout=40.0)) as c:
        c.seal = None
        trusted = transport == "host"
        own = c.world - 1
        for send in (
            lambda: c.all_gather_object(Own(1) if c.rank == own else 1),
            lambda: c.compare_object(Own(1) if c.rank == own else 1),
            lambda: c.broadcast_object({"a": [Own(c.rank)]}, root=own),
        ):
            if trusted:
                send()
                continue
            with pytest.raises(ConfigError, match=rf"rank {own} passed a \S*\.Own, .* SHERD_TOKEN .* plain data"):
                send()
        with pytest.raises(ConfigError) as caught:
            c.all_gather_object((lambda: 0) if c.rank == 0 else c.rank)
        words.append(str(caught.value))
        assert "rank 0 passed a function, which " + ("cannot be" if trusted else "has to be pickled") in words[0]
        assert c.all_gather_object(c.rank) == list(range(c.world))
        assert int(c.all_reduce(torch.ones(1)).wait()) == c.world
        c.seal = SEAL
        assert [each.rank for each in c.all_gather_object(Own(c.rank))] == list(range(c.world))
        assert c.broadcast_object(Own(c.rank), root=own).rank == own
    return words


@pytest.mark.parametrize("transport", ["host", "c10d", "cluster"])
def test_what_cannot_be_sent_is_one_error_everywhere(ranks, transport):
    pool = ranks(4 if transport == "cluster" else 2)
    run = (on_hosts, 2, refused, transport) if transport == "cluster" else (refused, transport)
    assert len({tuple(words) for words in pool.run(*run)}) == 1


# ---------------------------------------------------------------- sherd's own are plain


class Normed(nn.Module):
    """With buffers, and a part that starts frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(15, 7), nn.BatchNorm1d(7), nn.Linear(7, 5)
        self.last.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


class Numbers(SequentialSampler):
    """Indices of another kind."""

    def __init__(self, data, kind):
        super().__init__(data)
        self._kind = kind

    def __iter__(self):
        return map(self._kind, super().__iter__())


def never(*args, **kwargs):
    raise AssertionError("something was unpickled")


def train_without_pickles(transport):
    with comm.connect(CommOptions(transport=transport, timeout=40.0)) as c:
        assert c.seal is None or transport == "c10d"
        c.seal = None
        kept = pickle.loads, pickle.load, pickle.Unpickler
        pickle.loads = pickle.load = pickle.Unpickler = never
        try:
            for strategy in STRATEGIES:
                _train(c, strategy)
            _differ(c)
        finally:
            pickle.loads, pickle.load, pickle.Unpickler = kept


def _train(c, strategy):
    data = TensorDataset(*batch(0, rows=24))
    samplers = [{"sampler": Numbers(data, kind)} for kind in (int, numpy.int32, numpy.longlong, torch.tensor)]
    samplers.append({"shuffle": True})
    loaders = [DataLoader(data, batch_size=2, **sampler) for sampler in samplers]
    loaders.append(DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, False)))
    model = Normed()
    optimizer = torch.optim.AdamW(
        [{"params": list(model.parameters()), "lr": numpy.float64(0.01), "note": numpy.str_("a")}]
    )
    sherd.distribute(model, optimizer, *loaders, strategy=strategy, comm=c)
    for loader in loaders:
        for x, y in loader:
            loss_of(model, (x, y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.last.bias.requires_grad_(True)
    assert optimizer.state_dict()["state"]
    model.load_state_dict(model.state_dict())
    assert "ranks" in sherd.describe(model)


def _differ(c):
    model = Normed()
    with pytest.raises(Diverged, match=r"rank 0 has StepOptions\(accumulate=1, .* rank 1 has S\w+\(accumulate=2"):
        sherd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=1 + c.rank, comm=c)
    with pytest.raises(Diverged, match=r"has ZeRO\(stage=2, .* has ZeRO\(stage=1, shard_over='world'"):
        sherd.distribute(model, strategy=sherd.ZeRO(stage=2 - c.rank), comm=c)
    with pytest.raises(Diverged, match=r"has lr=0.1 on rank 0 and 0.2"):
        sherd.distribute(model, torch.optim.SGD(model.parameters(), lr=numpy.float64(0.1 + c.rank / 10)), comm=c)


@pytest.mark.parametrize("transport", ["c10d", "host"])
def test_training_unpickles_nothing(ranks, transport):
    ranks(2).run(train_without_pickles, transport)
