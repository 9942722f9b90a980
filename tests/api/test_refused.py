"""A `distribute` that is refused, at whatever point, leaves everything as it was, to be passed again."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import sherd
from sherd import ConfigError, Diverged, SherdError
from sherd.api import apply
from sherd.comm import SoloCommunicator
from sherd.engine import assembly, engine
from sherd.engine.engine import Engine
from sherd.engine.modules.buffers import BufferSync
from tests.helpers.processes import descriptors
from tests.helpers.training import connected, same, weights


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class Objects:
    """Everything that a `distribute` can change, with all that can hang on it."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        first = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.model = nn.Sequential(first, nn.SyncBatchNorm(4), nn.Flatten(), nn.Linear(16, 6), nn.Linear(6, 3))
        self.model[3].weight.requires_grad_(False)
        self.model.register_buffer("wide", torch.full((1, 1), float(seed)).expand(2, 3))
        self.model[4].weight.grad = torch.ones(3, 6)
        self.model[4].weight.mark = "the user's"
        self.model.register_forward_hook(lambda *_: None)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        for parameter in trained:
            moments = {name: torch.full_like(parameter, 0.5) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
        torch.manual_seed(7)
        rows = TensorDataset(torch.randn(12, 2, 2, 2), torch.randn(12, 3))
        self.loader = DataLoader(rows, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(5))
        self.other = DataLoader(rows, batch_size=2)

    @property
    def all(self):
        return self.model, self.optimizer, self.loader, self.other

    def train(self):
        for x, y in itertools.islice(self.loader, 2):
            (self.model(x) - y).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return weights(self.model), {name: buffer.clone() for name, buffer in self.model.named_buffers()}


def plain(value):
    """What can be compared by `==`: a tensor by its identity, its memory and its bits."""
    if isinstance(value, torch.Tensor):
        raw = torch.Tensor.grad.__get__(value)
        hooks = getattr(value, "_post_accumulate_grad_hooks", None)
        values = value.detach().clone().contiguous().view(-1).tolist()
        form = type(value), value.data_ptr(), value.stride(), value.shape, value.dtype, value.requires_grad
        own = {name: plain(each) for name, each in vars(value).items()}
        return id(value), form, values, own, None if raw is None else plain(raw), None if hooks is None else [*hooks]
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, dict):
        return [(plain(key), plain(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, nn.Module | torch.optim.Optimizer | DataLoader):
        return id(value), type(value), plain(dict(vars(value)))
    return value if isinstance(value, int | float | str | bool | None) else id(value)


def snapshot(objects):
    return {
        "model": plain(objects.model),
        "optimizer": plain(objects.optimizer),
        "loader": plain(objects.loader),
        "other": plain(objects.other),
        "words": repr(objects.model),
        "length": len(objects.loader),
    }


# ---------------------------------------------------------------- what is refused


def wrong(c, objects, *more, leave_out=(), **options):
    kept = [thing for thing in objects.all if not any(thing is each for each in leave_out)]
    drawn = torch.get_rng_state()
    try:
        sherd.distribute(*kept, *more, comm=c, **options)
    finally:
        assert torch.equal(torch.get_rng_state(), drawn)


def other_learning_rate(c, objects, **options):
    group = objects.optimizer.param_groups[0]
    before, group["lr"] = group["lr"], 0.2 + c.rank
    try:
        wrong(c, objects, **options)
    finally:
        group["lr"] = before


def another_optimizer(kind, foreign=False):
    def call(c, objects, **options):
        wrong_one = kind((nn.Linear(2, 2) if foreign else objects.model).parameters())
        wrong(c, objects, wrong_one, leave_out=[objects.optimizer], **options)

    return call


def state_that_cannot_be_cut(c, objects, **options):
    state = objects.optimizer.state[objects.model[4].weight]
    state["tensors"] = [torch.ones(3)]
    try:
        wrong(c, objects, **options)
    finally:
        del state["tensors"]


def loader_of(length):
    return DataLoader(TensorDataset(torch.zeros(length, 1)), batch_size=2)


ALWAYS = {
    "an unknown option": lambda c, o, **k: wrong(c, o, acumulate=2, **k),
    "an option that is wrong": lambda c, o, **k: wrong(c, o, accumulate=0, **k),
    "something else": lambda c, o, **k: wrong(c, o, "zero2", **k),
    "the same twice": lambda c, o, **k: wrong(c, o, o.loader, **k),
    "two optimizers": lambda c, o, **k: wrong(c, o, torch.optim.SGD(o.model.parameters(), lr=1.0), **k),
    "another model's optimizer": another_optimizer(torch.optim.SGD, foreign=True),
    "a batch that cannot be": lambda c, o, **k: wrong(c, o, leave_out=[o.loader, o.other], global_batch=4, **k),
    "a batch that is not even": lambda c, o, **k: wrong(c, o, global_batch=8 * c.world + 1, accumulate=4, **k),
    "a model that cannot be": lambda c, o, **k: wrong(c, o, nn.Embedding(2, 2, max_norm=1.0), **k),
}
TOGETHER = {
    "options that differ": lambda c, o, **k: wrong(c, o, accumulate=1 + c.rank, **k),
    "an option that one has wrong": lambda c, o, **k: wrong(c, o, accumulate=c.rank, **k),
    "models that differ": lambda c, o, **k: wrong(c, o, nn.Linear(3 + c.rank, 2), **k),
    "one without its optimizer": lambda c, o, **k: wrong(c, o, leave_out=[o.optimizer] * c.rank, **k),
    "optimizers that differ": other_learning_rate,
    "loaders that differ": lambda c, o, **k: wrong(c, o, loader_of(4 + c.rank), **k),
    "one more loader": lambda c, o, **k: wrong(c, o, *[loader_of(4)] * c.rank, **k),
    "a stream": lambda c, o, **k: wrong(c, o, DataLoader(Numbers(), batch_size=2), **k),
    "a stream on one rank": lambda c, o, **k: wrong(c, o, DataLoader(Numbers()) if c.rank else loader_of(4), **k),
}
SHARDED = {
    "an optimizer that cannot be cut": another_optimizer(torch.optim.LBFGS),
    "state that cannot be cut": state_that_cannot_be_cut,
}


@contextlib.contextmanager
def failing(place, name, error, after):
    """`place.name` raises, before or after it does what it does."""
    original = getattr(place, name)

    def broken(*args, **options):
        if after:
            original(*args, **options)
        raise error

    setattr(place, name, broken)
    try:
        yield
    finally:
        setattr(place, name, original)


POINTS = [
    (Engine, "__init__"),
    (assembly, "updater_for"),
    (apply.optimizer_object, "install"),
    (apply, "enrol"),
    (apply, "share_statistics"),
    (apply, "refuse_foreign"),
    (apply.data.Sharding, "apply"),
    (Engine, "take_over"),
]
LATE = [(engine, "take_from_leader"), (BufferSync, "__init__"), (apply.data, "announce")]
"""Where rank 0's values have been taken over already."""


def refuse(c, objects, call, strategy, expected):
    before = snapshot(objects)
    try:
        call(c, objects, strategy=strategy)
    except expected:
        pass
    else:
        raise AssertionError("it was not refused")
    after = snapshot(objects)
    for what, known in before.items():
        assert after[what] == known, (what, known, after[what])


def refused(c, strategy, cases, steps=True):
    rank = c.rank
    twin = Objects(rank)
    sherd.distribute(*twin.all, strategy=strategy, comm=c)
    expected = twin.train()

    def check(name, objects):
        sherd.distribute(*objects.all, strategy=strategy, comm=c)
        if steps:
            for found, known in zip(objects.train(), expected, strict=True):
                same(found, known, name)

    for name, call in cases.items():
        objects = Objects(rank)
        refuse(c, objects, call, strategy, (ConfigError, Diverged))
        check(name, objects)
    for (place, name), after in [*itertools.product(POINTS[:-1], (False, True)), (POINTS[-1], False)]:
        objects = Objects(rank)
        with failing(place, name, KeyboardInterrupt(), after):
            refuse(c, objects, wrong, strategy, KeyboardInterrupt)
        check((name, after), objects)
    for place, name in LATE:
        objects = Objects(0)  # the values of rank 0 are everybody's by then
        with failing(place, name, MemoryError(), after=True):
            refuse(c, objects, wrong, strategy, MemoryError)
        check(name, objects)


def refused_by_ranks(strategy, transport):
    with connected(transport) as c:
        sharded = SHARDED if strategy != "ddp" else {}
        refused(c, strategy, {**ALWAYS, **TOGETHER, **sharded}, steps=transport == "host")


@pytest.mark.parametrize(
    ("strategy", "transport"),
    [
        ("ddp", "host"),
        pytest.param("zero2", "host", marks=pytest.mark.fuzz),
        ("zero3", "host"),
        ("zero3", "c10d"),  # passed again, and not trained with: training is the same as above
    ],
)
def test_what_is_refused_is_as_before_and_can_be_passed_again(ranks, strategy, transport):
    ranks(2).run(refused_by_ranks, strategy, transport)


@pytest.mark.fake
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_in_a_world_of_one_too(strategy):
    refused(SoloCommunicator(), strategy, ALWAYS)


# ---------------------------------------------------------------- the communicator


def refused_without_a_communicator():
    def once():
        objects = Objects(0)
        with pytest.raises(ConfigError):
            sherd.distribute(*objects.all, global_batch=7)

    once()
    before, threads = descriptors(), threading.active_count()
    for _ in range(5):
        once()
    assert descriptors() <= before
    assert threading.active_count() <= threads


def test_a_communicator_of_its_own_is_closed(ranks):
    ranks(2).run(refused_without_a_communicator)


def one_rank_fails():
    objects, rank = Objects(0), int(os.environ["RANK"])
    began = time.monotonic()
    if rank:
        with failing(assembly, "updater_for", MemoryError("too little"), after=False), pytest.raises(MemoryError):
            sherd.distribute(*objects.all)
    else:
        with pytest.raises(SherdError, match="failed on rank 1, and therefore on all ranks: MemoryError: too little"):
            sherd.distribute(*objects.all)
    assert time.monotonic() - began < 60
    sherd.distribute(*objects.all)
    objects.train()


def test_others_hear_of_a_rank_that_fails_alone_and_all_can_try_again(ranks):
    ranks(2).run(one_rank_fails)
