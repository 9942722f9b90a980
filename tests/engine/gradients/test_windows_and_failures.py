"""Loops out of the ordinary: what is cleared in windows, weights, backwards elsewhere and backwards that fail."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import sherd
from sherd import ConfigError, SherdError
from tests.helpers.training import (
    EVERYWHERE,
    STRATEGIES,
    Failing,
    batch,
    close,
    connected,
    differ,
    distributed,
    double,
    gradients,
    loss_of,
    same,
    sgd,
    weights,
    whole_batch,
)


def mine(c, step=0):
    return batch(c.rank, step, dtype=torch.float64)


def everybodys(step=0):
    return whole_batch(step, dtype=torch.float64)


def in_one_process(step=0, share=1.0):
    """A plain model after one backward, and its optimizer."""
    model = double()
    (loss_of(model, everybodys(step)) * share).backward()
    return model, sgd(model)


def backward_elsewhere():
    torch.ones(3, requires_grad=True).square().sum().backward()


# -------------------------------------------------------------------- windows


def clear_model(model):
    model.zero_grad()


def clear_parameters(model):
    for parameter in model.parameters():
        parameter.grad = None


def cleared(clear):
    plain = double()
    reference = sgd(plain)
    for step in range(6):
        (loss_of(plain, everybodys(step)) / 2).backward()
        if step % 2:
            reference.step()
            reference.zero_grad()
    with connected() as c:
        for strategy, where in EVERYWHERE:
            model, optimizer = distributed(c, strategy, double, accumulate=2, accumulate_at=where)
            for step in range(6):
                loss_of(model, mine(c, step)).backward()
                optimizer.step()
                clear(model)
            close(weights(model), weights(plain), (strategy, where))


@pytest.mark.parametrize("clear", [clear_model, clear_parameters])
def test_nothing_is_cleared_inside_a_window(ranks, clear):
    ranks(2).run(cleared, clear)


def short_window():
    plain, reference = in_one_process(share=1 / 2)
    reference.step()
    with connected() as c:
        for strategy, where in EVERYWHERE:
            model, optimizer = distributed(c, strategy, double, accumulate=2, accumulate_at=where)
            loss_of(model, mine(c)).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.step()
            close(weights(model), weights(plain), (strategy, where))


def test_the_last_step_of_a_window_is_real_without_a_backward_of_its_own(ranks):
    ranks(2).run(short_window)


# -------------------------------------------------------------------- weights


def weighed_and_clipped():
    plain, reference = in_one_process()
    expected = gradients(plain)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    reference.step()
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, double)
            sherd.weigh(model, 1000)
            loss_of(model, mine(c)).backward()
            close(gradients(model), expected, strategy)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            close(gradients(model), gradients(plain), strategy)
            optimizer.step()
            close(weights(model), weights(plain), strategy)


def test_a_weighed_gradient_is_the_mean_when_it_is_read_and_clipped(ranks):
    ranks(2).run(weighed_and_clipped)


def weighed_then_not():
    plain, _ = in_one_process()
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, double)
            sherd.weigh(model, 3)
            loss_of(model, mine(c)).backward()
            with pytest.raises(ConfigError, match="some backwards of one step were weighed"):
                loss_of(model, mine(c)).backward()
            optimizer.zero_grad()
            loss_of(model, mine(c)).backward()
            close(gradients(model), gradients(plain), strategy)


def test_after_zero_grad_backwards_need_no_weight_any_more(ranks):
    ranks(2).run(weighed_then_not)


# -------------------------------------------------------------------- other backwards, and failed ones


def edited_then_elsewhere():
    with connected() as c:
        for strategy in STRATEGIES:
            model, _ = distributed(c, strategy, double)
            loss_of(model, mine(c)).backward()
            for parameter in model.parameters():
                parameter.grad.mul_(100)
            backward_elsewhere()
            norm = sherd.clip_grad_norm_(model, 1e9).item()
            seen = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()
            assert norm == pytest.approx(seen), strategy


def test_the_norm_of_an_edited_gradient_after_a_backward_elsewhere(ranks):
    ranks(2).run(edited_then_elsewhere)


def nan_then_elsewhere():
    nan = float("nan")
    with connected() as c:
        for strategy in STRATEGIES:
            for repaired in (False, True):
                model, optimizer = distributed(c, strategy, double)
                before = weights(model)
                (loss_of(model, mine(c)) * (nan if repaired else 1.0)).backward()
                for parameter in model.parameters():
                    if repaired:
                        parameter.grad.nan_to_num_(1.0)
                    else:
                        parameter.grad.mul_(nan)
                backward_elsewhere()
                optimizer.step()
                assert differ(weights(model), before) == repaired, (strategy, repaired)
                assert all(p.isfinite().all() for p in model.parameters()), (strategy, repaired)


def test_nan_put_in_or_taken_out_counts_after_a_backward_elsewhere(ranks):
    ranks(2).run(nan_then_elsewhere)


def failed_elsewhere():
    plain, reference = in_one_process()
    reference.step()
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, double)
            loss_of(model, mine(c)).backward()
            with pytest.raises(ValueError, match="no way back"):
                Failing.apply(torch.ones(3, requires_grad=True)).sum().backward()
            optimizer.step()
            close(weights(model), weights(plain), strategy)


def test_a_backward_that_fails_elsewhere_leaves_the_gradient(ranks):
    ranks(2).run(failed_elsewhere)


def failed_early():
    plain, reference = in_one_process(1)
    reference.step()
    with connected() as c:
        for strategy in STRATEGIES:
            model, optimizer = distributed(c, strategy, double)
            loss_of(model, mine(c)).backward()
            with pytest.raises(ValueError, match="no way back"):
                Failing.apply(loss_of(model, mine(c))).backward()
            model.zero_grad()
            loss_of(model, mine(c, 1)).backward()
            optimizer.step()
            close(weights(model), weights(plain), strategy)


def test_training_goes_on_after_a_backward_that_failed_before_any_gradient(ranks):
    ranks(2).run(failed_early)


def failed_late():
    """The second backward of a step fails, on all ranks, when the first of its gradients have been exchanged."""
    for strategy, accumulate_at in EVERYWHERE:
        with connected() as c:
            model, optimizer = distributed(c, strategy, double, bucket_bytes=1024, accumulate_at=accumulate_at)
            for step in range(2):  # the order of buckets is learned: they are exchanged as they come
                loss_of(model, mine(c, step)).backward()
                if step == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            before = weights(model)
            model[0].weight.register_hook(fail)
            with pytest.raises(ValueError, match="no way back"):
                loss_of(model, mine(c, 2)).backward()
            for call in (optimizer.step, partial(sherd.clip_grad_norm_, model, 1.0)):
                with pytest.raises(SherdError, match=r"an earlier backward failed \(no way back\) after gradients had"):
                    call()
            same(weights(model), before, strategy)
            optimizer.zero_grad()


def fail(_):
    raise ValueError("no way back")


def test_no_step_is_taken_with_half_a_gradient(ranks):
    ranks(2).run(failed_late)
