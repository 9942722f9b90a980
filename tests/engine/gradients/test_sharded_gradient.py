"""`p.grad` where a rank keeps a part: what costs nothing, what is gathered, and what becomes of one that is kept."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn

import sherd
from sherd.engine.gradients.sharded_gradient import ShardedGradient
from tests.helpers.training import batch, connected, distributed, loss_of

pytestmark = pytest.mark.ranks

SHARDED = ("zero1", "zero2", "zero3")


def gathers(c, call):
    before = c.counters.total().payload
    found = call()
    return c.counters.total().payload - before, found


def asking():
    """Questions that need no elements send nothing, and parameters keep their class."""
    with connected("c10d") as c:
        for strategy in ("zero1", "zero2"):
            model, optimizer = distributed(c, strategy)
            loss_of(model, batch(c.rank)).backward()
            weight = model[0].weight
            assert type(weight) is nn.Parameter

            def ask(model=model, weight=weight):
                gradient = weight.grad
                assert gradient is weight.grad is not None and isinstance(gradient, ShardedGradient)
                assert gradient.shape == weight.shape and gradient.dtype == weight.dtype
                assert gradient.stride() == weight.stride() and not gradient.is_sparse and gradient.numel() == 105
                assert len(gradient) == 7 and gradient.device == weight.device and gradient.is_contiguous()
                gradient.mul_(0.5)
                gradient.div_(torch.tensor(2.0))
                weight.grad /= 2
                assert weight.grad is gradient
                model.zero_grad()
                assert weight.grad is None

            sent, _ = gathers(c, ask)
            assert sent == 0, strategy
            optimizer.zero_grad()


def test_what_needs_no_elements_sends_nothing(ranks):
    ranks(2).run(asking)


def scaled():
    """The same bits whether a gradient is scaled in parts or whole."""
    with connected() as c:
        found = {}
        for strategy in ("ddp", *SHARDED):
            model, optimizer = distributed(c, strategy)
            for step in range(3):
                loss_of(model, batch(c.rank, step)).backward()
                for parameter in model.parameters():
                    parameter.grad.mul_(0.3)
                    parameter.grad /= 1.7
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                model[0].bias.grad.zero_()
                optimizer.step()
                optimizer.zero_grad()
            found[strategy] = torch.cat([p.detach().clone().flatten() for p in model.parameters()]), norm
        for strategy, (values, norm) in found.items():
            assert torch.equal(values, found["ddp"][0]) and norm == found["ddp"][1], strategy


def test_scaling_in_parts_changes_no_bit(ranks):
    ranks(2).run(scaled)


def kept(strategy):
    """One that a program keeps stays what it was, whether or not it was read before."""
    with connected() as c:
        model, optimizer = distributed(c, strategy)
        plain, plain_optimizer = distributed(c, "ddp")
        for step in range(4):
            for each in (model, plain):
                loss_of(each, batch(c.rank, step)).backward()
            old, expected = model[0].weight.grad, plain[0].weight.grad
            read = model[2].weight.grad
            read.add_(1.0)
            after = read.clone()
            for each in (optimizer, plain_optimizer):
                each.zero_grad()
            for each in (model, plain):
                loss_of(each, batch(c.rank, step + 10)).backward()
            assert torch.equal(old, expected) and not torch.equal(old, model[0].weight.grad)
            assert torch.equal(read, after)
            for each in (optimizer, plain_optimizer):
                each.zero_grad()


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_gradient_that_is_kept_stays_what_it_was(ranks, strategy):
    ranks(2).run(kept, strategy)


def copied():
    with connected() as c:
        model, _ = distributed(c, "zero2")
        loss_of(model, batch(c.rank)).backward()
        gradient = model[0].weight.grad
        whole = sherd.full_grad(model[0].weight)
        assert type(whole) is torch.Tensor
        file = io.BytesIO()
        torch.save(gradient, file)
        file.seek(0)
        for each in (copy.deepcopy(gradient), gradient.clone(), gradient + 0, torch.load(file)):
            assert type(each) is torch.Tensor and torch.equal(each, whole)
        assert gradient.tolist() == whole.tolist() and "tensor(" in repr(gradient)
        assert torch.equal(torch.stack([gradient, gradient])[1], whole)
        assert torch.equal(torch.from_numpy(gradient.numpy().copy()), whole)


def test_copies_are_plain_tensors(ranks):
    ranks(2).run(copied)


def different():
    with connected() as c:
        model, optimizer = distributed(c, "zero2")
        loss_of(model, batch(c.rank)).backward()
        model[0].weight.grad.mul_(1.0 + c.rank)
        with pytest.raises(sherd.Diverged, match=r"p\.grad was edited in place differently on rank 0 and rank 1"):
            optimizer.step()


def test_ranks_that_scale_by_different_numbers_are_named(ranks):
    ranks(2).run(different)


def gone(strategy):
    """A gradient outlives its model, and keeps nothing of it alive."""
    with connected() as c:
        for put_back in (False, True):
            model, optimizer = distributed(c, strategy)
            loss_of(model, batch(c.rank)).backward()
            expected, parameter = model[0].weight.grad.clone(), weakref.ref(model[0].weight)
            kept = [each.grad for each in model.parameters()]
            if put_back:
                optimizer.zero_grad()
                for each, gradient in zip(model.parameters(), kept, strict=True):
                    each.grad = gradient
                del each, gradient
            del model, optimizer
            gc.collect()
            assert torch.equal(kept[0], expected) and parameter() is None, put_back


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_gradient_outlives_its_model(ranks, strategy):
    ranks(2).run(gone, strategy)


def compiled():
    with connected() as c:
        model, optimizer = distributed(c, "zero2")
        faster = torch.compile(model, backend="eager")
        for size in (4, 3):  # the second time it is compiled while there are gradients
            x, _ = batch(c.rank)
            faster(x[:size]).square().mean().backward()
        optimizer.step()


def test_torch_compile_may_look_at_gradients(ranks):
    ranks(2).run(compiled)


def another_model_fails():
    with connected() as c:
        one, first = distributed(c, "zero2")
        other, second = distributed(c, "zero2")
        loss_of(one, batch(c.rank)).backward()
        first.step()
        first.zero_grad()
        first.param_groups[0]["lr"] = 0.1 + c.rank
        with pytest.raises(sherd.Diverged, match="lr="):
            loss_of(one, batch(c.rank)).backward()
        loss_of(other, batch(c.rank)).backward()
        second.step()


def test_another_model_goes_on_after_one_fails_at_the_end_of_a_backward(ranks):
    ranks(2).run(another_model_fails)


def dropped(strategy):
    """`model.zero_grad()` drops what was not exchanged yet, too."""
    with connected() as c:
        found = []
        for stale in (True, False):
            model, optimizer = distributed(c, strategy)
            if stale:
                loss_of(model, batch(c.rank, 0)).backward()
                with sherd.no_sync(model):
                    loss_of(model, batch(c.rank, 1)).backward()
                model.zero_grad()
            for step in (2, 3):
                loss_of(model, batch(c.rank, step)).backward()
            optimizer.step()
            found.append(torch.cat([each.detach().clone().flatten() for each in model.parameters()]))
        assert torch.equal(*found)


@pytest.mark.parametrize("strategy", ["ddp", *SHARDED])
def test_what_was_not_exchanged_is_dropped_too(ranks, strategy):
    ranks(2).run(dropped, strategy)


def set_before(strategy):
    with connected() as c:
        model, optimizer = distributed(c, strategy)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + c.rank)
        loss_of(model, batch(c.rank)).backward()
        with pytest.raises(sherd.Diverged, match=r"'0\.weight' and \d more was set to different values"):
            optimizer.step()


@pytest.mark.parametrize("strategy", ["ddp", *SHARDED])
def test_gradients_set_differently_before_a_backward_are_found(ranks, strategy):
    ranks(2).run(set_before, strategy)
