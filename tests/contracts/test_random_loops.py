"""Random training loops: all strategies see the same bits in every gradient, norm and weight, and what torch sees.

A loop is a list of instructions, each the name of a method of `InOneProcess` and what that takes. It is drawn from a
seed and printed with it when something fails.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import nn

import sherd
from tests.helpers.training import STRATEGIES, adamw, batch, connected, same, sgd, weights

CLIP = 0.05
LENGTH = 14
WHOLE_ONLY = ("model_zero_grad", "read", "scale", "drop", "put", "clip", "clip_by_torch")
"""What asks for a gradient that was exchanged."""
FREQUENCIES = {
    "backward": 3,
    "held_backward": 1,
    "step": 2,
    "zero_grad": 2,
    "elsewhere": 1,
    **dict.fromkeys(WHOLE_ONLY, 1),
}


class Net(nn.Module):
    """A scalar, an empty parameter, one larger than a bucket, tied ones, and layers used sometimes and never."""

    def __init__(self, mixed=False):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.wide = nn.Linear(15, 97)
        self.narrow = nn.Linear(97, 15)
        self.first = nn.Linear(15, 15)
        self.second = nn.Linear(15, 15, bias=False)
        self.never = nn.Parameter(torch.ones(11))
        self.tied = nn.Linear(15, 15)
        self.twin = nn.Linear(15, 15)
        self.twin.weight = self.tied.weight
        self.head = nn.Linear(15, 5)
        if mixed:
            self.wide.to(torch.bfloat16)
            self.first.to(torch.bfloat16)
            self.second.to(torch.float64)
            self.head.to(torch.float16)
        else:
            self.to(torch.float64)

    def forward(self, x, route):
        """The bits of `route` say which layers are on the way."""
        x = _through(self.narrow, torch.tanh(_through(self.wide, x))) * self.scale
        if route & 1:
            x = torch.tanh(_through(self.first, x))
        if route & 2:
            x = torch.tanh(_through(self.second, x))
        if route & 4:
            x = _through(self.twin, torch.tanh(_through(self.tied, x)))
        return _through(self.head, x)


def _through(layer, x):
    return layer(x.to(layer.weight.dtype)).to(x.dtype)


class Case(NamedTuple):
    """What a loop runs on."""

    mixed: bool  # dtypes, which one process adds up in another way: no comparison with torch
    adam: bool
    bucket_bytes: int | None
    accumulate_at: str | None


def drawn(seed, world):
    """A case, and a loop of instructions for it."""
    draw = random.Random(seed)
    case = Case(
        mixed=draw.random() < 0.25,
        adam=draw.random() < 0.5,
        bucket_bytes=draw.choice((1024, 4096, None)),
        accumulate_at=draw.choice((None, "rank", "owner")),
    )
    parameters = [name for name, _ in Net().named_parameters()]
    names = draw.choices(list(FREQUENCIES), list(FREQUENCIES.values()), k=LENGTH)
    program, held = [], False
    for number, name in enumerate(["backward", *names, "step"]):
        if name == "held_backward" and case.accumulate_at is None:
            continue  # the strategies' own choices differ, and so does the order in which held gradients are added
        if name.endswith("backward"):
            usual = draw.randrange(8)
            routes = [usual if draw.random() < 0.5 else draw.randrange(8) for _ in range(world)]
            program.append((name, number, routes))
            held = name == "held_backward"
        elif name == "zero_grad":
            to_none = held or draw.random() < 0.5
            program.append((name, to_none))
            held = False
        elif name in WHOLE_ONLY and held:
            continue
        else:
            program.append((name, draw.choice(parameters)) if name in ("read", "scale", "drop", "put") else (name,))
            held = held and name != "step"
    return case, program


class InOneProcess:
    """A loop in plain torch, with the batches of all ranks. `seen` is what it came to see."""

    def __init__(self, case):
        self.dtype = torch.float32 if case.mixed else torch.float64
        self.model = Net(case.mixed)
        adam = case.adam and not case.mixed
        self.optimizer = adamw(self.model, lr=1e-3) if adam else sgd(self.model, lr=1e-2)
        self.seen = []

    def run(self, program):
        for name, *arguments in program:
            getattr(self, name)(*arguments)
        return self.seen

    def loss(self, number, rank, route):
        x, y = batch(rank, number, dtype=self.dtype)
        return (self.model(x, route) - y).square().mean()

    def backward(self, number, routes):
        losses = [self.loss(number, rank, route) for rank, route in enumerate(routes)]
        (sum(losses) / len(losses)).backward()

    def held_backward(self, number, routes):
        self.backward(number, routes)

    def step(self):
        self.optimizer.step()
        self.seen.append(weights(self.model))

    def zero_grad(self, to_none):
        self.optimizer.zero_grad(set_to_none=to_none)

    def model_zero_grad(self):
        self.model.zero_grad()

    def read(self, name):
        gradient = self.model.get_parameter(name).grad
        self.seen.append({name: None if gradient is None else gradient.clone()})

    def scale(self, name):
        gradient = self.model.get_parameter(name).grad
        if gradient is not None:
            gradient.mul_(-1.5)

    def drop(self, name):
        self.model.get_parameter(name).grad = None

    def put(self, name):
        parameter = self.model.get_parameter(name)
        parameter.grad = torch.full_like(parameter.detach(), 0.01)

    def clip(self):
        self.clip_by_torch()

    def clip_by_torch(self):
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.seen.append({"norm": norm.double()})

    def elsewhere(self):
        """A backward that has nothing to do with the model."""
        torch.ones(2, requires_grad=True).square().sum().backward()


class OnRanks(InOneProcess):
    """The same, distributed."""

    def __init__(self, case, c, strategy, **more):
        super().__init__(case)
        options = {"bucket_bytes": case.bucket_bytes, "accumulate_at": case.accumulate_at, **more}
        sherd.distribute(self.model, self.optimizer, strategy=strategy, comm=c, **options)
        self.rank = c.rank

    def backward(self, number, routes):
        self.loss(number, self.rank, routes[self.rank]).backward()

    def held_backward(self, number, routes):
        with sherd.no_sync(self.model):
            self.backward(number, routes)

    def clip(self):
        self.seen.append({"norm": sherd.clip_grad_norm_(self.model, CLIP).double()})


@contextmanager
def told(seed, strategy, case, program):
    """A failure comes with all that it takes to see it again."""
    try:
        yield
    except Exception as error:
        lines = "\n    ".join(map(str, program))
        raise AssertionError(f"seed {seed}, {strategy}, {case}:\n    {lines}\n{error}") from error


def loop(seed):
    """The last weights of a loop that every strategy has run."""
    with connected() as c:
        case, program = drawn(seed, c.world)
        expected = None if case.mixed else InOneProcess(case).run(program)
        first = None
        for strategy in STRATEGIES:
            with told(seed, strategy, case, program):
                seen = OnRanks(case, c, strategy).run(program)
                if expected is not None:
                    torch.testing.assert_close(seen, expected, rtol=1e-7, atol=1e-10)
                first = first or seen
                torch.testing.assert_close(seen, first, rtol=0, atol=0, equal_nan=True)
        return first[-1]


def check(ranks, world, seed):
    first, *others = ranks(world).run(loop, seed)
    for other in others:
        same(other, first, seed)


@pytest.mark.parametrize("seed", range(12))
def test_random_loops_of_2_ranks(ranks, seed):
    check(ranks, 2, seed)


@pytest.mark.parametrize("seed", range(12, 16))
def test_random_loops_of_3_ranks(ranks, seed):
    check(ranks, 3, seed)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(1000, 1700))
@pytest.mark.parametrize("world", [2, 3, 4])
def test_many_random_loops(ranks, world, seed):
    check(ranks, world, seed)
