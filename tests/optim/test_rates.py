"""Learning rates that follow the batch, and warm-ups."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import sherd
from sherd.errors import ConfigError
from sherd.optim import LAMB, scaled_lr, warmup

pytestmark = pytest.mark.fake


def optimizer_of(rates=(0.8, 0.2)):
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in rates])


def rates_of(optimizer, scheduler, steps):
    """The rates with which each step is taken, by group."""
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return [list(each) for each in zip(*found, strict=True)]


def test_rates_grow_with_the_batch():
    assert scaled_lr(0.1, 8192, 256) == 3.2
    assert scaled_lr(0.1, 1024, 256, rule="sqrt") == 0.2
    assert scaled_lr(0.1, 64, 256) == 0.025
    assert scaled_lr(1e-3, 256, 256, "sqrt") == 1e-3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0.1, 512, 256, "linaer"), "rule='linaer' is unknown; did you mean 'linear'"),
        ((0.1, 0, 256), "batch=0; write a positive"),
        ((0.1, 512, -1), "reference_batch=-1"),
        ((float("nan"), 512, 256), "lr=nan"),
        ((float("inf"), 512, 256), "lr=inf"),
    ],
)
def test_rates_that_make_no_sense(arguments, words):
    with pytest.raises(ConfigError, match=words):
        scaled_lr(*arguments)


def test_the_rate_grows_evenly_and_stays():
    optimizer = optimizer_of()
    found = rates_of(optimizer, warmup(optimizer, 3), 6)
    assert found[0] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert found[1] == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2, 0.2])
    assert found[0][3:] == [0.8] * 3, "exactly, as nothing adds up"
    optimizer = optimizer_of()
    assert rates_of(optimizer, warmup(optimizer, 2, start=0.5), 4)[0] == pytest.approx([0.4, 0.6, 0.8, 0.8])
    optimizer = optimizer_of()
    assert rates_of(optimizer, warmup(optimizer, 1, start=0.0), 3)[0] == [0.0, 0.8, 0.8]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: lr_scheduler.StepLR(o, 2, 0.1),
        lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: lr_scheduler.PolynomialLR(o, 5),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.5 + 0.1 * (step % 3)),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=[2.0, 1.0], total_steps=12, cycle_momentum=False),
        lambda o: lr_scheduler.CyclicLR(o, [0.1, 0.2], [1.0, 0.4], step_size_up=2, cycle_momentum=False),
        lambda o: lr_scheduler.ConstantLR(o, 0.25, total_iters=3),
        lambda o: lr_scheduler.LinearLR(o, 0.5, 0.1, total_iters=4),
        lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o, 0.25, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
        ),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 2, 0.1)], milestones=[3]
        ),
    ],
)
def test_what_follows_has_the_rates_that_it_has_by_itself(make):
    optimizer, alone = optimizer_of(), optimizer_of()
    scheduler = warmup(optimizer, 4, after=make(optimizer))
    top = [group["initial_lr"] for group in optimizer.param_groups]
    found = rates_of(optimizer, scheduler, 12)
    assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    expected = rates_of(alone, make(alone), 8)
    for mine, others, rate in zip(found, expected, top, strict=True):
        assert mine[:4] == pytest.approx([rate * k / 5 for k in (1, 2, 3, 4)])
        assert mine[4:] == others, "to the last bit"


def test_what_follows_may_have_rates_in_tensors():
    found = []
    for steps in (0, 3):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.8))
        scheduler = lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.5)
        scheduler = warmup(optimizer, steps, after=scheduler) if steps else scheduler
        found.append([])
        for _ in range(6):
            found[-1].append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            scheduler.step()
    assert found[1] == pytest.approx([0.2, 0.4, 0.6, *found[0][:3]])


def test_a_momentum_that_cycles_follows_too():
    optimizer, alone = (torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9) for _ in range(2))
    momenta = []
    for each, steps in ((alone, 0), (optimizer, 3)):
        scheduler = lr_scheduler.OneCycleLR(each, max_lr=1.0, total_steps=10)
        scheduler = warmup(each, steps, after=scheduler) if steps else scheduler
        momenta.append([])
        for _ in range(10):
            momenta[-1].append(each.param_groups[0]["momentum"])
            each.step()
            if len(momenta[-1]) < 10:
                scheduler.step()
    assert momenta[1] == [momenta[0][0]] * 3 + momenta[0][:7]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.5),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.PolynomialLR(o, 9), lr_scheduler.ExponentialLR(o, 0.9)]),
    ],
)
def test_a_warm_up_is_saved_and_goes_on(make):
    optimizer = optimizer_of()
    scheduler = warmup(optimizer, 4, after=make(optimizer))
    for first in (2, 4):  # in the middle, and in what follows
        rates_of(optimizer, scheduler, first)
        state = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
        other = optimizer_of()
        again = warmup(other, 4, after=make(other))
        other.load_state_dict(state[0])
        again.load_state_dict(state[1])
        expected = rates_of(*copy.deepcopy((optimizer, scheduler)), 5)
        assert rates_of(other, again, 5) == expected
        assert len(set(expected[0])) > 3


@pytest.mark.parametrize("after", [False, True])
def test_it_counts_real_steps(after):
    model = nn.Linear(3, 2)
    model, optimizer = sherd.distribute(model, LAMB(model.parameters(), lr=0.8), accumulate=3)
    later = lr_scheduler.StepLR(optimizer, 1, 0.5) if after else None
    scheduler = warmup(optimizer, 3, after=later)
    found = []
    for _ in range(15):
        found.append(optimizer.param_groups[0]["lr"])
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    rates = [0.2, 0.4, 0.6, 0.8, 0.4 if after else 0.8]
    assert found == pytest.approx([rate for rate in rates for _ in range(3)])


def used_already(optimizer):
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    rates_of(optimizer, scheduler, 1)
    return scheduler


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda o: warmup(o, 0), "steps=0; write a whole number"),
        (lambda o: warmup(o, 2.5), "steps=2.5"),
        (lambda o: warmup(o, 3, start=1.5), "start=1.5; write a part of the rate"),
        (lambda o: warmup(o, 3, after=lr_scheduler.ReduceLROnPlateau(o)), "needs a metric"),
        (lambda o: warmup(o, 3, after=lambda step: 1.0), "is no scheduler"),
        (lambda o: warmup(o, 3, after=lr_scheduler.StepLR(optimizer_of(), 1)), "another optimizer"),
        (lambda o: warmup(o, 3, after=used_already(o)), "has taken 1 steps already"),
        (lambda o: warmup(o, 3, after=lr_scheduler.ChainedScheduler([used_already(o)])), "has taken 1 steps already"),
    ],
)
def test_warm_ups_that_make_no_sense(make, words):
    with pytest.raises(ConfigError, match=words):
        make(optimizer_of())
