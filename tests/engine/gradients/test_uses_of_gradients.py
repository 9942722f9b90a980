"""What programs do with `p.grad` where a rank keeps a part: norms, factors, other memory, a look on one rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sherd
from tests.helpers.training import SHARDED, batch, connected, distributed, loss_of

pytestmark = pytest.mark.ranks


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
                before = c.counters.total().payload
                norms = torch._foreach_norm(some, order)
                sent[strategy] = c.counters.total().payload - before
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
                    float(kept[-1].max())
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


def test_unusual_uses_of_a_gradient(ranks):
    expected = ranks(2).run(unusual, "ddp")
    for strategy in SHARDED:
        for (norms, values), (others, same) in zip(ranks(2).run(unusual, strategy), expected, strict=True):
            assert all(map(torch.equal, norms, others)) and all(map(torch.equal, values, same)), strategy


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
