"""Loops with a loss scale have the bits of those without one; overflows are skipped by all ranks."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.checkpoint import checkpoint

import sherd
from sherd import LossScale, observe
from tests.helpers.training import STRATEGIES, adamw, batch, connected, gradients, loss_of, network, same, sgd, weights

# It changes in the middle of every loop, and gets beyond what a float16 holds.
SCALE = LossScale(initial=2.0**14, growth_interval=2, ceiling=2.0**17)


def let_go(*models):
    """The next models begin with a scale of their own, though these may still be in memory."""
    for model in models:
        summed = model._sherd_training.engine.summed
        if summed.scaling is not None:
            summed.scaling.leave(summed)


class Parts(nn.Module):
    """A layer that some batches do not use, one that none does, and a checkpoint."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.sometimes, self.last = nn.Linear(15, 33), nn.Linear(33, 33), nn.Linear(33, 5)
        self.never = nn.Parameter(torch.ones(7))

    def forward(self, x, skips=False, reentrant=False):
        x = self.first(x)
        if not skips:
            x = checkpoint(self.sometimes, x, use_reentrant=True) if reentrant else self.sometimes(x)
        return self.last(torch.tanh(x))


def plain(model, optimizer, c, step):
    x, y = batch(c.rank, step)
    (model(x, reentrant=step == 2) - y).square().mean().backward()


def unused(model, optimizer, c, step):
    x, y = batch(c.rank, step)
    (model(x, skips=(step % 2 == 0 and c.rank == 0) or step == 3) - y).square().mean().backward()


def weighed(model, optimizer, c, step):
    sherd.weigh(model, 3.0 * (c.rank + 1) + step)
    plain(model, optimizer, c, step)


def held(model, optimizer, c, step):
    with sherd.no_sync(model):
        plain(model, optimizer, c, step)
    plain(model, optimizer, c, step + 10)


def several(model, optimizer, c, step):
    plain(model, optimizer, c, step)
    unused(model, optimizer, c, step)


def penalised(model, optimizer, c, step):
    """Loss and logits are both returned, and used."""
    x, y = batch(c.rank, step)
    logits = model(x)
    loss = (logits - y).square().mean() + 0.01 * sum(p.square().sum() for p in model.parameters())
    torch.autograd.backward([loss, logits], [None, torch.full_like(logits, 1e-3)])


def clipped(model, optimizer, c, step):
    plain(model, optimizer, c, step)
    if step % 2:
        sherd.clip_grad_norm_(model, 0.2)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)


LOOPS = {
    plain: {},
    unused: {"clip_norm": 0.3},
    weighed: {"accumulate": 2},
    held: {"accumulate_at": "rank"},
    several: {"accumulate_at": "owner", "loss_reduction": "sum"},
    penalised: {"bucket_bytes": 1024},
    clipped: {"nonfinite": "allow"},
}


def trained(c, strategy, loop, scale):
    """The gradients that a loop sees, and the weights that it leaves."""
    model = Parts()
    optimizer = adamw(model)
    sherd.distribute(model, optimizer, strategy=strategy, comm=c, loss_scale=scale, **LOOPS[loop])
    seen = []
    for step in range(6):
        loop(model, optimizer, c, step)
        if step % 2:
            seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    engine = model._sherd_training.engine
    assert scale is not SCALE or engine.scale.value > SCALE.initial
    let_go(model)
    return [*seen, weights(model)]


def gathered():
    """Where parameters are gathered on use."""
    with connected("c10d") as c:
        for strategy in (sherd.ZeRO(stage=3), sherd.ZeRO(stage=2)):
            for loop in (plain, unused):
                expected, found = (trained(c, strategy, loop, scale) for scale in (None, SCALE))
                for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                    same(one, other, (loop, strategy, number))


def test_a_scale_changes_no_bit_of_gathered_parameters(ranks):
    ranks(2).run(gathered)


def loops():
    with connected() as c:
        # Alone, gradients without a scale go another way, where weights and windows round differently.
        none = None if c.world > 1 else LossScale(initial=1.0, growth=1.0)
        for loop in LOOPS:
            for strategy in STRATEGIES if c.world > 1 else ("ddp",):
                expected, found = (trained(c, strategy, loop, scale) for scale in (none, SCALE))
                for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                    same(one, other, (loop, strategy, number))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_scale_changes_no_bit(ranks, world):
    ranks(world).run(loops)


# ---------------------------------------------------------------- overflows

OVERFLOWS = {1: "some", 2: "all", 5: "some", 6: "some", 9: "all"}  # by step


def reference(scale, steps, interval=3):
    """The scale that each step has, with hysteresis 1."""
    found, good = [], 0
    for step in range(steps):
        found.append(scale)
        if step in OVERFLOWS:
            scale, good = scale / 2, 0
        else:
            good += 1
            if good == interval:
                scale, good = scale * 2, 0
    return found


def overflows(c, step):
    where = OVERFLOWS.get(step)
    return where == "all" or (where == "some" and c.rank == c.world - 1)


def overflowing(c, strategy, nonfinite, accumulate):
    model = network()
    optimizer = sgd(model)
    options = LossScale(initial=2.0**10, growth_interval=3)
    how = {"nonfinite": nonfinite, "accumulate": accumulate}
    sherd.distribute(model, optimizer, strategy=strategy, comm=c, loss_scale=options, **how)
    rates = LambdaLR(optimizer, lambda step: 0.1 / (1 + step))
    by_epoch = StepLR(optimizer, 1, gamma=1.0)
    expected, found, taken = reference(2.0**10, 12), [], 0
    scale, gradient = model._sherd_training.engine.scale, model._sherd_training.engine.gradients[0]
    for step in range(12):
        for number in range(accumulate):
            loss = loss_of(model, batch(c.rank, 10 * step + number))
            (loss * math.inf if overflows(c, step) and not number else loss).backward()
            if number == accumulate - 1:
                found.append(scale.value)
            before = weights(model)
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
        skipped = torch.equal(before["0.weight"], model[0].weight)
        assert skipped == (step in OVERFLOWS), (strategy, step)
        taken += not skipped
        assert rates.last_epoch == taken, (strategy, step)
        if step % 4 == 1:  # the last step before it was skipped, and others were not
            count = by_epoch.last_epoch
            by_epoch.step()
            assert by_epoch.last_epoch == count + 1, step
    assert found == expected, (strategy, found)
    assert (gradient.steps, gradient.skipped, gradient.overflowed) == (7, 5, 5)
    text = sherd.describe(model)
    assert f"loss scale {scale.value:g}, " in text and "5 steps skipped by overflows" in text, text
    let_go(model)


def by_strategy(check, *arguments):
    with connected() as c:
        for strategy in STRATEGIES:
            check(c, strategy, *arguments)


@pytest.mark.parametrize(("world", "nonfinite", "accumulate"), [(1, None, 2), (2, "allow", 1), (3, "raise", 2)])
def test_overflows_are_skipped_by_all_ranks(ranks, world, nonfinite, accumulate):
    ranks(world).run(by_strategy, overflowing, nonfinite, accumulate)


def huge(c, strategy, scale):
    """Steps from gradients that are finite at small scales only: how many were skipped, and the weights."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-50)
    sherd.distribute(model, optimizer, strategy=strategy, comm=c, loss_scale=scale)
    gradient = model._sherd_training.engine.gradients[0]
    while gradient.steps < 3:
        (loss_of(model, batch(c.rank, gradient.steps)) * 2.0**50).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert gradient.skipped < 60
    let_go(model)
    return gradient.skipped, weights(model)


def searching(c, strategy):
    none, expected = huge(c, strategy, None)
    some, scaled = huge(c, strategy, LossScale(initial=2.0**90, ceiling=2.0**90, hysteresis=2))
    assert none == 0 and some > 4 and some % 2 == 0, (none, some)
    same(scaled, expected, strategy)


def exhausted(c, strategy):
    """The same error on all ranks, which names what overflows."""
    searching(c, strategy)
    model = network()
    optimizer = sgd(model)
    sherd.distribute(model, optimizer, strategy=strategy, comm=c, loss_scale=LossScale(initial=4.0))
    before, text = weights(model), ""
    for step in range(3):
        loss = loss_of(model, batch(c.rank, step))
        if c.rank == c.world - 1:
            loss = loss + (model[2].bias * math.inf).sum()
        loss.backward()
        try:
            optimizer.step()
        except sherd.SherdError as error:
            text = str(error)
        optimizer.zero_grad()
        assert bool(text) == (step == 2), (strategy, step, text)
    expected = (
        f"rank {c.rank}: step 0: the gradient of '2.bias' is NaN or infinite even at a loss scale of 1, the smallest"
    )
    assert text.startswith(expected) and "look for NaN" in text and "LossScale(floor=0.0625)" in text, text
    same(weights(model), before)
    loss_of(model, batch(c.rank)).backward()  # all ranks can go on
    optimizer.step()
    assert model._sherd_training.engine.gradients[0].steps == 1
    let_go(model)


@pytest.mark.parametrize("world", [1, 2])
def test_a_scale_is_found_or_the_culprit_named(ranks, world):
    ranks(world).run(by_strategy, exhausted)


# ---------------------------------------------------------------- several models


def pair(c, strategy, scale, critics):
    """The weights after a loop of a GAN, whose critic may be distributed without a scale, or not at all."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(15, 15), nn.Sequential(nn.Linear(15, 9), nn.Tanh(), nn.Linear(9, 1))
    ours, theirs = sgd(generator), sgd(critic)
    sherd.distribute(generator, ours, strategy=strategy, comm=c, loss_scale=scale)
    if critics != "plain":
        its = scale if critics == "scaled" else None
        sherd.distribute(critic, theirs, strategy=strategy, comm=c, loss_scale=its)
    for step in range(6):
        x, _ = batch(0 if critics == "plain" else c.rank, step)
        theirs.zero_grad()
        (critic(x).mean() - critic(generator(x).detach()).mean()).backward()
        overflows = step == 4 and scale and critics == "scaled"
        (critic(x).square().mean() * (math.inf if overflows else 1.0)).backward()
        if step != 4 or overflows:  # which skips it
            theirs.step()
        ours.zero_grad()
        critic(generator(x)).mean().backward()
        ours.step()
    let_go(generator, *(() if critics == "plain" else (critic,)))
    return {**weights(generator), **{f"critic {name}": each for name, each in weights(critic).items()}}


def two_optimizers(c, strategy):
    """Of one model: both skip what overflows, which counts once."""
    model = network()
    optimizers = sgd(model[0]), adamw(model[2])
    options = LossScale(initial=2.0**10, growth_interval=2)
    sherd.distribute(model, *optimizers, strategy=strategy, comm=c, loss_scale=options)
    engine, scales = model._sherd_training.engine, []
    for step in range(5):
        loss = loss_of(model, batch(c.rank, step))
        (loss * math.inf if step == 2 and c.rank == 0 else loss).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        scales.append(engine.scale.value)
    assert scales == [1024, 2048, 1024, 1024, 2048], scales
    assert [(each.steps, each.overflowed) for each in engine.gradients] == [(4, 1), (4, 1)]
    let_go(model)


def several_models(c, strategy):
    for critics in ("scaled", "unscaled", "plain"):
        expected, found = (pair(c, strategy, scale, critics) for scale in (None, SCALE))
        same(found, expected, (strategy, critics))
    two_optimizers(c, strategy)


@pytest.mark.parametrize("world", [1, 2])
def test_models_and_optimizers_share_a_scale(ranks, world):
    ranks(world).run(by_strategy, several_models)


def apart():
    """Ranks that do not have the same scale are told so."""
    with connected() as c:
        model = network()
        sherd.distribute(model, sgd(model), strategy="zero2", comm=c, loss_scale=SCALE)
        model._sherd_training.engine.scale.value *= 1 + c.rank
        with pytest.raises(sherd.Diverged, match="the loss scale is 16384 on rank 0 and 32768 on rank 1"):
            loss_of(model, batch(c.rank)).backward()


def test_ranks_with_different_scales_stop(ranks):
    ranks(2).run(apart)


def told():
    """What is logged and recorded of a run."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    log = logging.getLogger("sherd")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with connected() as c:
            model = network()
            optimizer = sgd(model)
            options = LossScale(initial=2.0**10, growth_interval=2, hysteresis=2)
            sherd.distribute(model, optimizer, strategy="zero2", comm=c, loss_scale=options)
            for step in range(6):
                loss = loss_of(model, batch(c.rank, step))
                (loss * math.inf if step in (1, 2) else loss).backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return [line for line in lines if "scale" in line[1] or line[0] == "WARNING"]


def test_changes_of_a_scale_are_told_once_and_each_step_has_its_own(ranks, tmp_path):
    first, second = ranks(2).run(told, env={"SHERD_EVENTS": str(tmp_path)})
    assert second == []
    why = "the gradient overflows at a loss scale of 1024"
    assert first == [
        ("INFO", f"step 1: {why}; the loss scale becomes 512 (2 steps skipped so far)"),
        ("INFO", "step 2: the loss scale becomes 1024 after 2 steps without an overflow"),
    ]
    events = list(observe.read(tmp_path))
    assert not any(event.kind == "warning" for event in events)
    for rank in range(2):
        steps = [event.fields for event in events if event.kind == "step" and event.rank == rank]
        assert [fields["loss_scale"] for fields in steps] == [1024, 1024, 1024, 512, 512, 1024]
        assert [fields["skipped"] for fields in steps] == [False, True, True, False, False, False]
