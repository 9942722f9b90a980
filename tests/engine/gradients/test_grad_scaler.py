"""A `torch.amp.GradScaler` of the user's own works as in plain torch, on parts of gradients."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import sherd
from sherd.engine.gradients.sharded_source import ShardedSource
from tests.helpers.training import (
    SHARDED,
    STRATEGIES,
    adamw,
    batch,
    connected,
    distributed,
    loss_of,
    network,
    same,
    weights,
)

SCALE = 2.0**10
STEPS = 6
OVERFLOW = (1, 4)  # steps whose loss is too large on the last rank


def losses(model, rank, world, step):
    loss = loss_of(model, batch(rank, step))
    return loss * 1e36 if step in OVERFLOW and rank == world - 1 else loss


def loop(model, optimizer, backward, clips):
    """What a script with a GradScaler does; the scale after each step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    scales = []
    for step in range(STEPS):
        backward(scaler, step)
        if clips == "torch":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        elif clips == "sherd":
            scaler.unscale_(optimizer)
            sherd.clip_grad_norm_(model, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def in_one_process(world, make):
    model = network()
    optimizer = make(model)

    def backward(scaler, step):
        scaler.scale(sum(losses(model, rank, world, step) for rank in range(world)) / world).backward()

    return loop(model, optimizer, backward, None), weights(model)


def fused(model):
    return adamw(model, fused=True)


def scaled():
    with connected() as c:
        for make in (adamw, fused):
            expected, plain = in_one_process(c.world, make)
            assert expected == [1024, 512, 512, 1024, 512, 512]
            for clips in (None, "sherd", "torch"):
                first = None
                for strategy in STRATEGIES:
                    model, optimizer = distributed(c, strategy, optimizer=make)
                    found = loop(
                        model,
                        optimizer,
                        lambda scaler, step, model=model: scaler.scale(losses(model, c.rank, c.world, step)).backward(),
                        clips,
                    )
                    assert found == expected, (strategy, clips, found)
                    mine = weights(model)
                    first = first or mine
                    same(mine, first, (strategy, clips))
                    if clips is None:
                        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)
        return first


@pytest.mark.parametrize("world", [2, 3])
def test_a_grad_scaler_scales_and_skips_as_in_plain_torch(ranks, world):
    first, *others = ranks(world).run(scaled)
    for other in others:
        same(other, first)


def in_windows():
    """A window of two with a GradScaler has the weights of the same loop without one."""
    with connected() as c:
        for strategy in STRATEGIES:
            for unscales in (False, True):
                found = []
                for enabled in (False, True):
                    model, optimizer = distributed(c, strategy, optimizer=adamw, accumulate=2)
                    scaler, scales = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=enabled), []
                    for step in range(8):
                        loss = loss_of(model, batch(c.rank, step))
                        overflows = step == 3 and c.rank == 0 and enabled
                        scaler.scale(loss * 1e36 if overflows else loss).backward()
                        if unscales:
                            scaler.unscale_(optimizer)
                        if enabled or step not in (2, 3):
                            scaler.step(optimizer)
                            scaler.update()
                        else:
                            optimizer.zero_grad()  # what an overflow leaves out
                            model.zero_grad()
                        optimizer.zero_grad()
                        scales.append(scaler.get_scale())
                    found.append(weights(model))
                assert scales == [SCALE] * 3 + [SCALE / 2] * 5, scales
                same(found[1], found[0], (strategy, unscales))


@pytest.mark.parametrize("world", [1, 2])
def test_a_grad_scaler_waits_for_the_end_of_a_window(ranks, world):
    ranks(world).run(in_windows)


def averaging():
    """An overflow on one rank alone, under strategies that meet every other step: all ranks meet at the same one."""
    with connected() as c:
        for strategy in (sherd.LocalSGD(every=2), sherd.Gossip()):
            model, optimizer = distributed(c, strategy)
            scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
            for step in range(6):
                loss = loss_of(model, batch(c.rank, step))
                scaler.scale(loss * 1e36 if step in (1, 2) and c.rank == 0 else loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            gradient = model._sherd_training.gradient(optimizer)
            assert (gradient.calls, gradient.skipped) == (6, 0 if c.rank else 2), strategy
        return weights(model)


def test_ranks_that_train_apart_skip_alone_and_meet_all_the_same(ranks):
    ranks(2).run(averaging)


def one_overflows(c, strategy, **options):
    """Two optimizers; in the second step the gradient of the first one's parameters overflows on the last rank."""
    model = network()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)]
    if strategy is not None:
        sherd.distribute(model, *optimizers, strategy=strategy, comm=c, **options)
    scaler, moved = torch.amp.GradScaler("cpu", init_scale=SCALE), []
    bad = []
    model[0].weight.register_hook(lambda gradient: gradient * float("inf") if bad else gradient)
    for step in range(3):
        bad[:] = [True] * (step == 1 and (strategy is None or c.rank == c.world - 1))
        before = weights(model)
        scaler.scale(loss_of(model, batch(c.rank, step))).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        after = weights(model)
        moved.append([not torch.equal(after[name], before[name]) for name in ("0.weight", "2.weight")])
    return moved, scaler.get_scale()


def two_optimizers():
    with connected() as c:
        plain = one_overflows(c, None)
        assert plain == ([[True, True], [False, True], [True, True]], SCALE / 2)
        for strategy in STRATEGIES:
            assert one_overflows(c, strategy, nonfinite="allow") == plain, strategy
            assert one_overflows(c, strategy) == ([[True, True], [False, False], [True, True]], SCALE / 2), strategy


def test_of_two_optimizers_one_overflows(ranks):
    """The scaler leaves out one step; sherd skips the other too, unless it is told to leave that to the scaler."""
    ranks(2).run(two_optimizers)


def in_parts():
    """The calls of a step with a GradScaler."""
    with connected() as c:
        found = {}
        for strategy in SHARDED:
            model, optimizer = distributed(c, strategy, optimizer=adamw)
            scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
            for step in range(2):
                scaler.scale(loss_of(model, batch(c.rank, step))).backward()
                before = {name: count.calls for name, count in c.counters.by_operation.items()}
                scaler.unscale_(optimizer)
                calls = {name: count.calls - before.get(name, 0) for name, count in c.counters.by_operation.items()}
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            found[strategy] = {name: count for name, count in calls.items() if count}
            # The test can fail: what reads elements gathers them.
            loss_of(model, batch(c.rank)).backward()
            before = c.counters.by_operation["all_gather"].calls
            model[0].weight.grad.abs()
            assert c.counters.by_operation["all_gather"].calls > before
        return found


def test_unscaling_gathers_no_gradient(ranks):
    for found in ranks(2).run(in_parts):
        assert found == {strategy: {"all_reduce": 1} for strategy in SHARDED}


def peak_of(do):
    """The most bytes that torch had allocated at one time in `do`, more than before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        do()
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    assert events
    return max(accumulate((each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())), initial=0))


def peak_of_step(c, strategy):
    """The same of a step with a GradScaler, and the bytes of the whole gradient."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # its update needs no memory
    sherd.distribute(model, optimizer, strategy=strategy, comm=c)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def step():
        scaler.unscale_(optimizer)
        scaler.step(optimizer)

    found = []
    for does in (step, lambda: found.append(peak_of(step))):
        scaler.scale(model(torch.randn(4, 128)).square().mean()).backward()
        does()
        scaler.update()
        optimizer.zero_grad()
    return found[0], sum(parameter.numel() * 4 for parameter in model.parameters())


def peaks():
    with connected() as c:
        found = {strategy: peak_of_step(c, strategy) for strategy in SHARDED}
        with pytest.MonkeyPatch.context() as patch:  # what happens where parts cannot be unscaled
            patch.setattr(ShardedSource, "unscale", lambda *_: False)
            return found, {strategy: peak_of_step(c, strategy) for strategy in SHARDED}


def test_a_step_with_a_grad_scaler_allocates_no_whole_gradient(ranks):
    for parts, gathered in ranks(2).run(peaks):
        for strategy in SHARDED:
            peak, whole = parts[strategy]
            assert peak < whole / 8, (strategy, peak, whole)
            peak, whole = gathered[strategy]
            assert peak >= whole, ("the test cannot fail", strategy, peak, whole)
