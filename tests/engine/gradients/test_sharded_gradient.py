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


class Scaled(nn.Linear):
    """A layer with a parameter that has no dimensions."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(15, 5)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        return super().forward(x) * self.scale


def scaled_by_wider_numbers():
    """Torch multiplies two tensors without dimensions in the wider dtype, and others in that of the first."""
    with connected() as c:
        found = {}
        for strategy in ("ddp", *SHARDED):
            model, optimizer = distributed(c, strategy, Scaled)
            found[strategy] = []
            for step in range(30):
                loss_of(model, batch(c.rank, step)).backward()
                by = torch.tensor(1 / (3 + step), dtype=torch.float64)
                for each in model.parameters():
                    each.grad.mul_(by)
                found[strategy].extend(each.grad.clone() for each in model.parameters())
                optimizer.zero_grad()
        for strategy in SHARDED:
            assert all(map(torch.equal, found[strategy], found["ddp"])), strategy


def test_scaling_by_a_number_of_a_wider_dtype_changes_no_bit(ranks):
    ranks(2).run(scaled_by_wider_numbers)


def of_many_shapes(seed=0):
    """Parameters that one rank has whole, that are cut between two, and one whose memory is transposed."""
    torch.manual_seed(seed)
    layers = [nn.Linear(n, 64, dtype=torch.float64) for n in (15, 64, 64, 64)]
    layers[2].weight.data = layers[2].weight.data.t().contiguous().t()
    return nn.Sequential(*layers, nn.Linear(64, 5, dtype=torch.float64))


def measured(order):
    with connected() as c:
        found, sent = {}, {}
        for strategy in ("ddp", *SHARDED):
            model, optimizer = distributed(c, strategy, of_many_shapes, bucket_bytes=120_000)
            seen = []
            for step in range(3):
                loss_of(model, batch(c.rank, step, dtype=torch.float64)).backward()
                some = [each.grad for each in model.parameters()][step:]
                sent[strategy], norms = gathers(c, lambda some=some: torch._foreach_norm(some, order))
                assert type(norms) is tuple and {type(each) for each in norms} == {torch.Tensor}
                torch._foreach_mul_(some, 0.5)
                if step == 1:  # what is read after is what was scaled
                    seen.append(some[0].clone())
                    seen.extend(torch._foreach_norm(some, order))
                seen.extend(norms)
                optimizer.step()
                optimizer.zero_grad()
            found[strategy] = [*seen, *(each.detach().clone() for each in model.parameters())]
        whole = sum(each.numel() for each in model.parameters()) * 8
        for strategy in SHARDED:
            assert all(map(torch.equal, found[strategy], found["ddp"])), strategy
            assert 0 < sent[strategy] < whole / 2, (strategy, sent, whole)


@pytest.mark.parametrize("order", [2, 2.0, float("inf"), 1.0])
def test_norms_have_the_bits_of_whole_gradients_and_send_less(ranks, order):
    ranks(2).run(measured, order)


def others_asked_for():
    """Other gradients of the same shapes, and other norms of the same ones."""
    for ask in (
        lambda model, rank: torch._foreach_norm([model[1 + rank].bias.grad, model[0].weight.grad]),
        lambda model, rank: torch._foreach_norm([model[1].bias.grad], 2.0 if rank else float("inf")),
        lambda model, rank: model[1 + rank].weight.grad.clone(),
    ):
        with connected(timeout=10) as c:
            model, _ = distributed(c, "zero2", of_many_shapes, bucket_bytes=1024)
            loss_of(model, batch(c.rank, dtype=torch.float64)).backward()
            with pytest.raises(sherd.Diverged, match="must make the same calls"):
                ask(model, c.rank)


def test_ranks_that_ask_for_different_things_are_named(ranks):
    ranks(2).run(others_asked_for)


def looked_at():
    """One rank may look at what all have read, or keep it: nothing was edited."""
    with connected() as c:
        found = {}
        for strategy in ("ddp", *SHARDED):
            model, optimizer = distributed(c, strategy, of_many_shapes)
            kept = []
            for step in range(3):
                scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
                scaler.scale(loss_of(model, batch(c.rank, step, dtype=torch.float64))).backward()
                norms = [torch.linalg.vector_norm(each.grad) for each in model.parameters()]
                norms.extend(each.grad.norm() for each in model.parameters())
                if c.rank == 0:
                    kept.extend(each.grad for each in model.parameters())
                    assert norms[0] > 0 and kept[-1].max() > -1
                seen = kept[-1].view(-1) if kept else None
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                assert seen is None or torch.equal(seen, kept[-1].view(-1))
                if step:
                    model[1].bias.grad = torch.ones(64, dtype=torch.float64)
                optimizer.step()
                optimizer.zero_grad()
            found[strategy] = [*norms, *(each.detach().clone() for each in model.parameters())]
        for strategy in SHARDED:
            assert all(map(torch.equal, found[strategy], found["ddp"])), strategy


def test_a_rank_may_look_alone_at_what_all_have_read(ranks):
    ranks(2).run(looked_at)


def unusual(strategy):
    """Gradients as arguments, as factors, in inference mode, and scaled by what requires a gradient."""
    with connected() as c:
        model, optimizer = distributed(c, strategy, of_many_shapes)
        loss_of(model, batch(c.rank, dtype=torch.float64)).backward()
        whole = {name: each.grad.clone() for name, each in model.named_parameters()}
        weight = model[0].weight
        assert torch.equal(torch.full_like(weight, 2.0).mul_(weight.grad), 2 * whole["0.weight"])
        optimizer.zero_grad()
        loss_of(model, batch(c.rank, dtype=torch.float64)).backward()
        with torch.inference_mode():
            norms = [*torch._foreach_norm([model[0].bias.grad, model[1].bias.grad]), weight.grad.norm()]
        weight.grad.mul_(0.5)
        assert torch.equal(weight.grad.clone(), 0.5 * whole["0.weight"])
        weight.grad.mul_(torch.tensor(4.0, requires_grad=True))
        assert torch.equal(weight.grad.detach(), 2 * whole["0.weight"])
        sherd.clip_grad_norm_(model, 1.0)
        optimizer.step()
        return norms, [each.detach().clone() for each in model.parameters()]


def by_itself(strategy):
    """Factors that are the gradient itself, memory of another's, lists of which one was written, and compiled calls."""
    with connected() as c:
        found = []
        for step, change in enumerate((times_itself, other_memory, one_written, bad_factor, compiled_clipping)):
            model, optimizer = distributed(c, strategy, Scaled, bucket_bytes=1024)
            loss_of(model, batch(c.rank, step)).backward()
            found.append(change(model))
            found.extend(each.grad.clone() for each in model.parameters())
            optimizer.step()
            found.extend(each.detach().clone() for each in model.parameters())
        return found


def times_itself(model):
    gradient = model.scale.grad
    gradient.mul_(gradient.detach())
    return gradient.clone()


def other_memory(model):
    for each in model.parameters():
        each.grad.data = each.grad.data.clamp(-0.1, 0.1)
    return model.bias.grad.clone()


def one_written(model):
    gradients = [each.grad for each in model.parameters()]
    gradients[1].add_(1.0)
    result = torch._foreach_mul_(gradients, 0.5)
    assert result is None or len(result) == 3
    return gradients[1].clone()


def bad_factor(model):
    model.weight.grad.sum()
    with pytest.raises(RuntimeError, match="can't be cast"):
        model.weight.grad.mul_(torch.tensor(1j))
    return model.bias.grad.clone()


def compiled_clipping(model):
    return torch.compile(torch.nn.utils.clip_grad_norm_, backend="eager")([*model.parameters()], 0.1)


@pytest.mark.parametrize("strategy", SHARDED)
def test_changes_that_are_more_than_scaling(ranks, strategy):
    for found, expected in zip(ranks(2).run(by_itself, strategy), ranks(2).run(by_itself, "ddp"), strict=True):
        assert all(map(torch.equal, found, expected)), [*map(torch.equal, found, expected)]


def two_optimizers():
    """One optimizer's zero_grad() forgets nothing of what was done to the other's gradients."""
    with connected() as c:
        model = Scaled()
        one, other = (torch.optim.SGD([each], lr=0.1) for each in (model.weight, model.bias))
        model, one, other = sherd.distribute(model, one, other, strategy="zero2", comm=c)
        loss_of(model, batch(c.rank)).backward()
        model.weight.grad.mul_(1 + c.rank)
        other.zero_grad()
        with pytest.raises(sherd.Diverged, match="edited in place differently"):
            one.step()


def test_what_one_optimizer_forgets_is_its_own(ranks):
    ranks(2).run(two_optimizers)


def test_unusual_uses_of_a_gradient(ranks):
    expected = ranks(2).run(unusual, "ddp")
    for strategy in SHARDED:
        for (norms, values), (others, same) in zip(ranks(2).run(unusual, strategy), expected, strict=True):
            assert all(map(torch.equal, norms, others)) and all(map(torch.equal, values, same)), strategy


class Complex(nn.Module):
    """Layers of complex numbers: their norms are real."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(15, 15, dtype=torch.complex64) for _ in range(3)))

    def forward(self, x):
        return self.layers(x.to(torch.complex64)).abs()[:, :5]


def complex_ones():
    with connected() as c:
        found = {}
        for strategy in ("ddp", *SHARDED):
            model, _ = distributed(c, strategy, Complex)
            loss_of(model, batch(c.rank)).backward()
            found[strategy] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert all(torch.equal(found[strategy], found["ddp"]) for strategy in SHARDED)


def test_complex_gradients_are_clipped(ranks):
    ranks(2).run(complex_ones)


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
