"""Accumulation: windows of `step()`, `no_sync`, several backwards, and sums instead of means."""

from __future__ import annotations

import warnings

import torch
from torch.optim import lr_scheduler as schedulers

import sherd
from tests.helpers.training import (
    EVERYWHERE,
    STRATEGIES,
    K,
    adamw,
    all_same,
    batch,
    close,
    connected,
    differ,
    distributed,
    double,
    gradients,
    loss_of,
    network,
    same,
    sgd,
    train,
    weights,
    whole_batch,
)


def windows():
    with connected() as c:
        found = {}
        for strategy, where in EVERYWHERE:
            model, optimizer = distributed(c, strategy, double, adamw, accumulate=K, accumulate_at=where)
            plain = double()
            reference = adamw(plain)
            for step in range(2 * K):
                before = weights(model)
                loss_of(model, batch(c.rank, step, dtype=torch.float64)).backward()
                (loss_of(plain, whole_batch(step, dtype=torch.float64)) / K).backward()
                real = step % K == K - 1
                seen = gradients(model)
                if real:
                    close(seen, gradients(plain), (strategy, where))
                else:
                    assert set(seen.values()) == {None} and sherd.clip_grad_norm_(model, 1.0).isnan()
                optimizer.step()
                optimizer.zero_grad()
                assert differ(weights(model), before) == real, (strategy, where, step)
                if real:
                    reference.step()
                    reference.zero_grad()
            close(weights(model), weights(plain), (strategy, where))
            found[strategy, where] = weights(model)
        for where in ("rank", "owner"):
            all_same({s: found[s, where] for s in STRATEGIES})


def test_every_third_step_is_real_and_takes_the_mean_of_all_micro_batches(ranks):
    ranks(2).run(windows)


def zero_grad_first():
    with connected() as c:
        for strategy in STRATEGIES:
            found = []
            for early in (False, True):
                model, optimizer = distributed(c, strategy, accumulate=K)
                for step in range(2 * K):
                    if early:
                        optimizer.zero_grad()
                    loss_of(model, batch(c.rank, step)).backward()
                    optimizer.step()
                    if not early:
                        optimizer.zero_grad()
                found.append(weights(model))
            same(*found, strategy)


def test_zero_grad_may_come_first_in_the_loop(ranks):
    ranks(2).run(zero_grad_first)


def cosine(optimizer):
    return schedulers.CosineAnnealingWarmRestarts(optimizer, T_0=3)


def sequential(optimizer):
    parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=2), schedulers.ExponentialLR(optimizer, 0.9)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[2])


def plateau(optimizer):
    return schedulers.ReduceLROnPlateau(optimizer, patience=1)


def halves(optimizer):
    return schedulers.StepLR(optimizer, step_size=1, gamma=0.5)


def rates(optimizer, scheduler, calls):
    found = []
    for _ in range(calls):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
        found.append(optimizer.param_groups[0]["lr"])
    return found


def scheduled():
    with connected() as c, warnings.catch_warnings():
        warnings.simplefilter("error")
        for strategy in ("ddp", "zero2"):
            for make in (halves, cosine, sequential, plateau):
                plain = sgd(network())
                expected = rates(plain, make(plain), 5)
                assert len(set(expected)) > 1
                for early in (True, False):
                    model = network()
                    optimizer = sgd(model)
                    scheduler = make(optimizer) if early else None
                    sherd.distribute(model, optimizer, strategy=strategy, accumulate=K, comm=c)
                    scheduler = scheduler or make(optimizer)
                    start = optimizer.param_groups[0]["lr"]
                    found = rates(optimizer, scheduler, 5 * K)
                    what = (strategy, make.__name__, early)
                    assert found[K - 1 :: K] == expected, what
                    assert found[: K - 1] == [start] * (K - 1), what


def test_schedulers_count_real_steps_and_torch_does_not_warn(ranks):
    ranks(2).run(scheduled)


def by_hand():
    with connected() as c:
        for strategy, where in EVERYWHERE:
            plain = double()
            reference = sgd(plain)
            for step in range(K):
                (loss_of(plain, whole_batch(step, dtype=torch.float64)) / K).backward()
            expected = gradients(plain)
            reference.step()
            for last_held in (False, True):
                model, optimizer = distributed(c, strategy, double, accumulate_at=where)
                for step in range(K):
                    loss = loss_of(model, batch(c.rank, step, dtype=torch.float64)) / K
                    if step < K - 1 or last_held:
                        with sherd.no_sync(model):
                            loss.backward()
                    else:
                        loss.backward()
                if not last_held:
                    close(gradients(model), expected, (strategy, where))
                optimizer.step()
                close(weights(model), weights(plain), (strategy, where, last_held))


def test_no_sync_by_hand(ranks):
    ranks(2).run(by_hand)


def counted_payload():
    sent = {}
    with connected() as c:
        for held in (False, True):
            model, optimizer = distributed(c, "ddp")
            train(model, optimizer, [batch(c.rank)])
            before = c.counters.total().payload
            for _ in range(K):
                with sherd.no_sync(model) if held else torch.enable_grad():
                    loss_of(model, batch(c.rank)).backward()
            optimizer.step()
            sent[held] = c.counters.total().payload - before
    return sent


def test_no_sync_sends_once(ranks):
    for sent in ranks(2).run(counted_payload):
        assert sent[False] == K * sent[True] > 0


def summed_losses():
    with connected() as c:
        for strategy, where in EVERYWHERE:
            model, optimizer = distributed(c, strategy, double, accumulate=K, accumulate_at=where, loss_reduction="sum")
            plain = double()
            reference = sgd(plain)
            for step in range(K):
                (loss_of(model, batch(c.rank, step, dtype=torch.float64)) * 15).backward()
                (loss_of(plain, whole_batch(step, dtype=torch.float64)) * 30).backward()
                optimizer.step()
            reference.step()
            close(weights(model), weights(plain), (strategy, where))


def test_losses_that_are_sums_are_added(ranks):
    ranks(2).run(summed_losses)


def several_backwards():
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, double)
            plain = double()
            reference = sgd(plain)
            optimizer.step()  # without a backward: nothing
            same(weights(model), weights(plain), strategy)
            for step in range(6):
                loss_of(model, batch(c.rank, step, dtype=torch.float64)).backward()
                loss_of(plain, whole_batch(step, dtype=torch.float64)).backward()
                close(gradients(model), gradients(plain), (strategy, step))
                if step % 2:
                    optimizer.step()
                    reference.step()
                if step == 3:  # at 1 it stays: the next backwards add to it
                    optimizer.zero_grad()
                    reference.zero_grad()
            close(weights(model), weights(plain), strategy)


def test_several_backwards_before_a_step_add_up_as_in_torch(ranks):
    ranks(2).run(several_backwards)


def with_closures():
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy)
            expected, plain = distributed(c, strategy)
            train(expected, plain, [batch(c.rank, step) for step in range(3)])
            for step in range(3):
                losses = []

                def closure(step=step, losses=losses, model=model, optimizer=optimizer):
                    optimizer.zero_grad()
                    losses.append(loss_of(model, batch(c.rank, step)))
                    losses[0].backward()
                    return losses[0]

                assert optimizer.step(closure) is losses[0] and len(losses) == 1
            same(weights(model), weights(expected), strategy)


def test_closures(ranks):
    ranks(2).run(with_closures)
