"""Several optimizers for one model, beside the same optimizers in a plain loop."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch

import sherd
from tests.engine.optimizer.owners import assert_same
from tests.helpers.training import (
    STRATEGIES,
    WORLD,
    K,
    all_same,
    batch,
    close,
    connected,
    loss_of,
    network,
    same,
    weights,
)


def matrices(model):
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


def vectors(model):
    return [parameter for parameter in model.parameters() if parameter.dim() < 2]


def two_adamw(model):
    return torch.optim.AdamW(matrices(model), lr=0.01), torch.optim.AdamW(vectors(model), lr=0.1, weight_decay=0.0)


def sgd_and_adamw(model):
    parts = (model[2].parameters(), model[0].parameters())
    return torch.optim.SGD(parts[0], lr=0.1, momentum=0.9), torch.optim.AdamW(parts[1], lr=0.01)


def muon_and_adamw(model):
    return torch.optim.Muon(matrices(model), lr=0.02), torch.optim.AdamW(vectors(model), lr=0.01)


def three(model):
    first, *others = model[2].parameters()
    return (
        torch.optim.RMSprop([first], lr=0.01),
        torch.optim.SGD([{"params": others}, {"params": [model[0].bias], "lr": 0.2}], lr=0.1),
        torch.optim.Adam([model[0].weight], lr=0.01, amsgrad=True),
    )


PAIRS = {make.__name__: make for make in (two_adamw, sgd_and_adamw, muon_and_adamw, three)}
CUT = [name for name in PAIRS if name != "muon_and_adamw"]


class Plain:
    """A plain loop's model and optimizers, which count their own windows; the gradient is clipped before the first step
    that is taken from a backward."""

    def __init__(self, make, accumulate=1, clip_norm=None, dtype=torch.float64):
        self.model = network(dtype=dtype)
        self.optimizers = make(self.model)
        self.length, self.clip_norm = accumulate, clip_norm
        self.calls = [0] * len(self.optimizers)
        self.clipped = True

    def backward(self, loss):
        (loss / self.length).backward() if self.length > 1 else loss.backward()
        self.clipped = self.clip_norm is None

    def step(self, number):
        self.calls[number] += 1
        if self.calls[number] % self.length == 0:
            if not self.clipped:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
                self.clipped = True
            self.optimizers[number].step()

    def zero_grad(self, number, **options):
        if self.calls[number] % self.length == 0:
            self.optimizers[number].zero_grad(**options)

    def zero_all(self):
        for number in range(len(self.optimizers)):
            self.zero_grad(number)


class Ours(Plain):
    def __init__(self, make, accumulate=1, clip_norm=None, dtype=torch.float64, **options):
        super().__init__(make, accumulate, clip_norm, dtype)
        given = (self.model, *self.optimizers)
        found = sherd.distribute(*given, accumulate=accumulate, clip_norm=clip_norm, **options)
        assert all(one is other for one, other in zip(found, given, strict=True))

    def backward(self, loss):
        loss.backward()

    def step(self, number):
        self.optimizers[number].step()

    def zero_grad(self, number, **options):
        self.optimizers[number].zero_grad(**options)

    def zero_all(self):
        self.model.zero_grad()


def every(training, call):
    for number in range(len(training.optimizers)):
        call(number)


def together(training, loss, step):
    training.backward(loss())
    every(training, training.step)
    every(training, training.zero_grad)


def one_by_one(training, loss, step):
    training.backward(loss())
    for number in range(len(training.optimizers)):
        training.step(number)
        training.zero_grad(number)


def from_the_last(training, loss, step):
    every(training, training.zero_grad)
    training.backward(loss())
    for number in reversed(range(len(training.optimizers))):
        training.step(number)


def by_the_model(training, loss, step):
    training.backward(loss())
    every(training, training.step)
    training.zero_all()


def to_zeros(training, loss, step):
    training.backward(loss())
    for number in range(len(training.optimizers)):
        training.step(number)
        training.zero_grad(number, set_to_none=number == 0)


def one_every_second_time(training, loss, step):
    """What the last one does not step from is added up for it."""
    training.backward(loss())
    for number in range(len(training.optimizers)):
        if step % 2 or number + 1 < len(training.optimizers):
            training.step(number)
            training.zero_grad(number)


def in_turn(training, loss, step):
    training.backward(loss())
    training.step(step % len(training.optimizers))
    every(training, training.zero_grad)


LOOPS = (together, one_by_one, from_the_last, by_the_model, to_zeros, one_every_second_time, in_turn)


def run(training, loop, data, steps=7):
    for step in range(steps):
        loop(training, lambda step=step: loss_of(training.model, data(step)), step)
    return weights(training.model)


# ---------------------------------------------------------------- a world of one


@pytest.mark.fake
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_alone_they_have_the_bits_of_the_plain_loop(name, strategy):
    for loop, options in itertools.product(LOOPS, ({}, {"bucket_bytes": 1024})):
        ours, plain = (
            Ours(PAIRS[name], dtype=torch.float32, strategy=strategy, **options),
            Plain(PAIRS[name], dtype=torch.float32),
        )
        for each in (ours, plain):
            run(each, loop, lambda step: batch(0, step))
        same(weights(ours.model), weights(plain.model), (name, loop.__name__))
        for one, other in zip(ours.optimizers, plain.optimizers, strict=True):
            assert_same(one.state_dict(), other.state_dict(), f"{name} {loop.__name__}")


@pytest.mark.fake
@pytest.mark.parametrize("name", PAIRS)
def test_alone_windows_and_clipping_are_those_of_the_plain_loop(name):
    for loop, length, clip in itertools.product(LOOPS, (1, K), (None, 0.3)):
        trained = [kind(PAIRS[name], accumulate=length, clip_norm=clip) for kind in (Ours, Plain)]
        found, expected = (run(each, loop, lambda step: batch(0, step, dtype=torch.float64), 13) for each in trained)
        close(found, expected, (loop.__name__, length, clip), rtol=1e-6 if clip else 1e-9)


def program(seed, optimizers):
    """Random calls: of backwards that use all parameters or some, of steps, of zero_grads, of state dicts."""
    draw = random.Random(seed)
    for step in range(30):
        yield draw.choice(("backward", "backward", "part"))
        for _ in range(draw.randrange(4)):
            yield draw.choice(("step", "step", "zero_grad", "zero_grad", "state")), draw.randrange(optimizers)
        if draw.random() < 0.1:
            yield "zero_all"
        yield step


def play(training, seed, data):
    found = []
    for step, calls in itertools.groupby(
        program(seed, len(training.optimizers)), key=lambda call: isinstance(call, int)
    ):
        for call in () if step else calls:
            x, y = data(len(found))
            if call == "backward":
                training.backward(loss_of(training.model, (x, y)))
            elif call == "part":
                training.backward(training.model[:2](x).square().mean())
            elif call == "zero_all":
                training.zero_all()
            elif call[0] == "state":
                optimizer = training.optimizers[call[1]]
                found.append(copy.deepcopy(optimizer.state_dict()))
                optimizer.load_state_dict(copy.deepcopy(found[-1]))  # torch's own would go on with the same tensors
            else:
                getattr(training, call[0])(call[1])
        found.append(weights(training.model))
    return found


@pytest.mark.fake
@pytest.mark.parametrize("name", PAIRS)
def test_alone_random_programs_have_the_bits_of_the_plain_loop(name):
    for seed in range(12):
        ours = Ours(PAIRS[name], dtype=torch.float32, strategy="ddp", bucket_bytes=1024 if seed % 2 else None)
        found, expected = (
            play(each, seed, lambda step: batch(0, step)) for each in (ours, Plain(PAIRS[name], dtype=torch.float32))
        )
        for step, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{name}, seed {seed}, step {step}")


# ---------------------------------------------------------------- on ranks


def whole(step):
    parts = [batch(rank, step, dtype=torch.float64) for rank in range(WORLD)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


ALL = tuple(itertools.product(LOOPS, (1, K), (None, 0.3)))
SOME = ALL[::3]  # every loop, and every length with and without clipping


def on_ranks(name, strategies, programs):
    with connected() as c:
        mine = lambda step: batch(c.rank, step, dtype=torch.float64)  # noqa: E731
        for loop, length, clip in programs:
            expected = run(Plain(PAIRS[name], length, clip), loop, whole, 13)
            for where in ("rank", "owner"):
                found = {}
                for strategy in strategies:
                    options = {"strategy": strategy, "comm": c, "accumulate_at": where, "bucket_bytes": 1024}
                    found[strategy] = run(Ours(PAIRS[name], length, clip, **options), loop, mine, 13)
                    what = (strategy, where, loop.__name__, length, clip)
                    close(found[strategy], expected, what, rtol=1e-6 if clip else 1e-9)
                all_same(found)


@pytest.mark.parametrize("name", CUT)
def test_every_strategy_trains_as_one_process_on_the_whole_batch(ranks, name):
    ranks(WORLD).run(on_ranks, name, STRATEGIES, SOME)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", CUT)
def test_every_program_under_every_strategy_trains_as_one_process(ranks, name):
    ranks(WORLD).run(on_ranks, name, STRATEGIES, ALL)


def test_muon_and_adamw_train_under_ddp(ranks):
    ranks(WORLD).run(on_ranks, "muon_and_adamw", ("ddp",), ALL)


def random_programs(name, seeds):
    with connected() as c:
        for seed in seeds:
            expected = play(Plain(PAIRS[name]), seed, whole)
            found = {}
            for strategy in STRATEGIES:
                ours = Ours(PAIRS[name], strategy=strategy, comm=c, accumulate_at="owner")
                found[strategy] = play(ours, seed, lambda step: batch(c.rank, step, dtype=torch.float64))
                for step, (one, other, first) in enumerate(zip(found[strategy], expected, found["ddp"], strict=True)):
                    what = f"{strategy}, seed {seed}, step {step}"
                    assert_same(one, first, what)
                    if "state" not in one:
                        close(one, other, what)


@pytest.mark.parametrize("name", CUT)
def test_random_programs_give_the_same_bits_under_every_strategy(ranks, name):
    ranks(WORLD).run(random_programs, name, range(4))
