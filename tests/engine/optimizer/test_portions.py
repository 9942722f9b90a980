"""Portions of a test's own around those in memory: the update has the same bits with and without them."""

from __future__ import annotations

import pytest
import torch
from torch import optim

from sherd.engine.optimizer.portions import Portion
from tests.engine.optimizer.owners import SGD_ALL, Owners, Plain, assert_same, new_parameters, tensors
from tests.engine.optimizer.test_object import Counting

pytestmark = pytest.mark.pure
SHAPES = [(7, 150), (3, 5), (300,), (), (0, 4), (11, 31)]
CASES = {
    "AdamW": (optim.AdamW, {"lr": 0.01}),
    "SGD": (optim.SGD, SGD_ALL),
    "RMSprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1}),
}


class Journal(Portion):
    """Saves the old values before a step and drops them after it."""

    def __init__(self, inner, saved, log):
        super().__init__(inner)
        self.saved, self.log, self.key = saved, log, len(log)
        log.append("made")

    def load(self):
        loaded = self.inner.load()
        tensors = {key: value.clone() for key, value in loaded.state.items() if isinstance(value, torch.Tensor)}
        self.saved[self.key] = loaded.value.clone(), tensors
        self.log.append("saved")
        return loaded

    def store(self, loaded):
        self.inner.store(loaded)
        del self.saved[self.key]
        self.log.append("cleared")


class OnDisk(Portion):
    """Keeps its state in a file between steps; in memory there are only counters."""

    def __init__(self, inner, folder):
        super().__init__(inner)
        self.path = folder / f"{inner.member.name}-{inner.begin}-{inner.end}.pt"
        self.fetched = None

    def prefetch(self):
        super().prefetch()
        self.fetched = torch.load(self.path) if self.path.exists() else {}

    def load(self):
        loaded = self.inner.load()
        assert not any(isinstance(kept, torch.Tensor) and kept.dim() for kept in loaded.state.values())
        return loaded._replace(state={**self.fetched, **loaded.state})

    def store(self, loaded):
        state = dict(loaded.state)
        large = {key: state.pop(key) for key, kept in loaded.state.items() if getattr(kept, "shape", ()) != ()}
        torch.save({key: kept.clone() for key, kept in large.items()}, self.path)
        self.inner.store(loaded._replace(state=state))


def stepped(case, world, steps=4, **how):
    """Owners whose updates run with the options `how(owner, step)`, beside the plain optimizer."""
    parameters = new_parameters(SHAPES)
    plain, owners = Plain(case, parameters), Owners(case, parameters, world, 256, 1 << 20)
    for step in range(steps):
        for shard in owners.shards:
            shard.step = lambda shard=shard, step=step: shard.run(**{key: make(shard) for key, make in how.items()})
        for stepper in (plain, owners):
            stepper.step(tensors(SHAPES, step), [True] * len(SHAPES))
        assert_same(owners.values(), plain.values(), f"step {step}")
    return plain, owners


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("batch", [None, 1, 2])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_journal(case, batch, world):
    saved, log = {}, []
    plain, owners = stepped(
        case, world, wrap=lambda shard: lambda portion: Journal(portion, saved, log), batch=lambda shard: batch
    )
    assert not saved
    assert log.count("made") == log.count("saved") == log.count("cleared") > 4
    assert_same(owners.state_dict(), plain.state_dict())


@pytest.mark.parametrize("batch", [None, 1, 2])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_state_in_files(case, batch, tmp_path):
    def wrap(shard):
        folder = tmp_path / str(shard._owner)
        folder.mkdir(exist_ok=True)
        return lambda portion: Journal(OnDisk(portion, folder), {}, [])

    if case[0] is optim.Adagrad:  # it makes its state in __init__, before there are files
        case = (Late, case[1])
    _, owners = stepped(case, 2, wrap=wrap, batch=lambda shard: batch)
    assert sum(1 for _ in tmp_path.rglob("*.pt")) > 4
    for shard in owners.shards:
        assert all(
            not torch.is_tensor(value) or not value.dim()
            for part in shard._parts.values()
            for value in part.state.values()
        )


class Late(optim.Adagrad):
    """Makes its state in the first step."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.state.clear()

    def step(self, closure=None):
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter not in self.state:
                self.state[parameter] = {"step": torch.tensor(0.0), "sum": torch.zeros_like(parameter)}
        return super().step(closure)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_what_is_counted_per_step_is_counted_once(batch):
    plain, owners = stepped((Counting, {}), 2, batch=lambda shard: batch)
    for optimizer in owners.optimizers():
        assert (optimizer.calls, optimizer.log) == (4, [1, 2, 3, 4])
        assert [group["count"] for group in optimizer.param_groups] == [4, 4]
    assert_same(owners.state_dict(), plain.state_dict())


def test_batches_are_fetched_one_ahead():
    calls = []

    class Spy(Portion):
        def prefetch(self):
            calls.append("fetch")

        def load(self):
            calls.append("load")
            return super().load()

    stepped(CASES["AdamW"], 1, 1, wrap=lambda shard: Spy, batch=lambda shard: 1)
    assert calls[:5] == ["fetch", "fetch", "load", "fetch", "load"]
    assert calls.count("fetch") == calls.count("load") > 4
