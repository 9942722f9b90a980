"""Where a loss scale enters a backward, what has it inside, and what never shows it: in a world of one."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import sherd
from sherd.api import apply
from sherd.engine.gradients import scaled_roots
from sherd.patches import backward
from tests.helpers.training import network, same, sgd, weights

pytestmark = pytest.mark.fake

S = 2.0**12
X = torch.linspace(-1, 1, 30).reshape(2, 15)


@pytest.fixture(autouse=True)
def alone():
    """No model of another test is scaled."""
    gc.collect()
    yield
    gc.collect()


class Seen:
    """A plain model, and a scaled copy of it."""

    def __init__(self, make=network, **scale):
        self.plain = make()
        self.scaled = copy.deepcopy(self.plain)
        self.optimizers = sgd(self.plain), sgd(self.scaled)
        sherd.distribute(self.scaled, self.optimizers[1], loss_scale=sherd.LossScale(initial=S, **scale))

    def compare(self, use, factor=S):
        """Both get the same gradients of `use(model)`; inside, those of the scaled one are `factor` times as large."""
        found = []
        for model, scaling in ((self.plain, None), (self.scaled, scaled_roots._process)):
            backward.scale_with(scaling)
            inside = []
            hook = model[2].register_full_backward_hook(lambda _, __, gradient, its=inside: its.append(gradient[0]))
            result = use(model)
            hook.remove()
            found.append((inside, result, {name: p.grad.clone() for name, p in model.named_parameters()}))
            model.zero_grad()
        (one, result, gradients), (other, scaled_result, scaled_gradients) = found
        same(scaled_gradients, gradients)
        assert len(one) == len(other) > 0
        assert all(torch.equal(mine * factor, theirs) for mine, theirs in zip(one, other, strict=True))
        if result is not None:
            torch.testing.assert_close(scaled_result, result, rtol=0, atol=0)


def implicit(model):
    model(X).square().mean().backward()


def given(model):
    model(X).backward(gradient=torch.full((2, 5), 0.5))


def several(model):
    out = model(X)
    torch.autograd.backward([out.sum(), out, out.mean()], [None, torch.ones(2, 5), torch.tensor(3.0)])


def with_old_name(model):
    with pytest.warns(FutureWarning, match="grad_variables"):
        torch.autograd.backward([model(X)], grad_variables=[torch.ones(2, 5)])


def from_an_edge(model):
    torch.autograd.backward(get_gradient_edge(model(X).sum()))


def some_inputs(model):
    x = X.clone().requires_grad_()
    model(x).sum().backward(inputs=[x, *model.parameters()])
    return x.grad


def retained(model):
    loss = model(X).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def penalised(model):
    """Loss and logits are returned, and a penalty on parameters is added that no output has."""
    logits = model(X)
    loss = logits.square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters())
    (loss + logits.sum()).backward()


def in_two_halves(model):
    """A backward by hand through a leaf: its gradient is the root of the next one."""
    hidden = model[0](X)
    leaf = hidden.detach().requires_grad_()
    model[1:](leaf).sum().backward()
    hidden.backward(leaf.grad)
    return leaf.grad


def checkpointed(model):
    x = X.clone().requires_grad_()
    checkpoint(model, x, use_reentrant=True).square().sum().backward()
    return x.grad


def checkpointed_twice(model):
    x = X.clone().requires_grad_()
    checkpoint(lambda x: checkpoint(model, x, use_reentrant=True), x, use_reentrant=True).square().sum().backward()
    return x.grad


def with_a_stranger(model):
    """A model that is not distributed, in the same graph."""
    torch.manual_seed(1)
    stranger, x = nn.Linear(5, 3), X.clone().requires_grad_()
    seen = []
    stranger.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for _ in range(2):
        stranger(model(x)).square().sum().backward()
    return [stranger.weight.grad, stranger.bias.grad, *seen, x.grad]


def with_a_hidden_stranger(model):
    torch.manual_seed(1)
    stranger, x = nn.Linear(5, 3), X.clone().requires_grad_()
    checkpoint(lambda x: stranger(model(x)), x, use_reentrant=True).square().sum().backward()
    return [stranger.weight.grad, stranger.bias.grad, x.grad]


@pytest.mark.parametrize(
    "use",
    [
        *(implicit, given, several, with_old_name, from_an_edge, some_inputs, retained, penalised, in_two_halves),
        *(checkpointed, checkpointed_twice, with_a_stranger, with_a_hidden_stranger),
    ],
)
def test_a_scale_is_inside_and_nowhere_else(use):
    Seen().compare(use)


def test_a_root_in_float16_holds_a_smaller_scale():
    seen = Seen(growth_interval=1, ceiling=2.0**17)
    scale = seen.scaled._sherd_training.engine.scale
    scale.value = 2.0**17
    seen.compare(lambda model: model(X).sum().half().backward(), factor=2.0**15)
    seen.compare(lambda model: torch.autograd.backward([model(X).sum().half(), model(X).sum()]), factor=2.0**15)
    seen.compare(lambda model: torch.autograd.backward(get_gradient_edge(model(X).sum().half())), factor=2.0**15)
    seen.compare(implicit, factor=2.0**17)


def test_small_gradients_survive_16_bits():
    """What passes a float16 is lost without a scale."""

    def use(model):
        hidden = model[0](X).half().float()  # its gradient is a float16 on the way
        (model[1:](hidden).square().mean() * 1e-9).backward()
        return model[0].weight.grad

    seen, exact = Seen(), network()
    seen.scaled._sherd_training.engine.scale.value = 2.0**24
    found = use(seen.scaled)
    (exact(X).square().mean() * 1e-9).backward()
    assert not use(seen.plain).any()
    assert found.abs().max() > 1e-11
    torch.testing.assert_close(found, exact[0].weight.grad, rtol=0.05, atol=1e-12)


def test_tensors_that_are_no_leaves_show_the_scale():
    model = Seen().scaled
    for retains in (True, False):
        hidden = model[0](X)
        if retains:
            hidden.retain_grad()
        hidden.sum().backward(inputs=None if retains else [hidden])
        assert torch.equal(hidden.grad, torch.full((2, 7), S))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_graph_of_gradients_is_scaled_back_too():
    seen = Seen()
    x = X.clone().requires_grad_()
    for parameter in seen.scaled.parameters():
        parameter.requires_grad_(False)
    seen.scaled[0].bias.requires_grad_()
    with pytest.raises(sherd.SherdError, match="create_graph=True"):
        seen.scaled(x).square().sum().backward(create_graph=True)
    x.grad = None
    stranger = nn.Linear(15, 15)
    (inner,) = torch.autograd.grad(seen.scaled(x).square().sum(), x, create_graph=True)
    (plain,) = torch.autograd.grad(seen.plain(x).square().sum(), x, create_graph=True)
    assert torch.equal(inner, plain), "torch.autograd.grad is not scaled"
    stranger(x).square().sum().backward(create_graph=True)  # it has nothing to do with the model
    (expected,) = torch.autograd.grad(stranger(x).square().sum(), x)
    assert torch.equal(x.grad, expected) and x.grad.requires_grad


def test_a_backward_of_another_model_is_left_alone():
    seen = Seen()
    other = nn.Sequential(nn.Linear(15, 15), nn.Linear(15, 1)).half()  # too small a range for a scale
    found = []
    other[0].register_full_backward_hook(lambda _, __, gradient: found.append(gradient[0]))
    with torch.no_grad():
        other[1].weight.fill_(100.0)
    (other(X.half()) * 100).sum().backward()
    assert torch.equal(found[0], torch.full((2, 15), 1e4).half())
    assert other[0].weight.grad.isfinite().all()
    seen.compare(implicit)


@pytest.mark.usefixtures("uncollected")
def test_a_scaled_model_may_be_collected_in_the_middle_of_a_backward():
    def gradients(when):
        Seen()  # dropped; its engine and its optimizer refer to each other
        torch.manual_seed(0)
        model = sherd.distribute(nn.Sequential(nn.Linear(15, 15), nn.Linear(15, 15)))
        first = checkpoint(model[0], X.clone().requires_grad_(), use_reentrant=True)
        second = checkpoint(model[1], first, use_reentrant=True)
        if when == "inside":
            second.register_hook(lambda _: gc.collect() and None)
        else:
            gc.collect()
        second.square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    same(gradients("inside"), gradients("before"))


def test_a_gradient_that_is_hidden_from_the_walk_is_scaled_all_the_same(monkeypatch):
    monkeypatch.setattr(scaled_roots, "_walk", lambda roots: (set(), []))
    Seen().compare(implicit, factor=1.0)


def test_a_loss_is_not_scaled_twice():
    seen = Seen()
    scaler, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(sherd.ConfigError, match=r"rank 0: .*scaled by a GradScaler.*write loss.backward\(\)"):
        scaler.scale(seen.scaled(X).sum()).backward()
    off.scale(seen.scaled(X).sum()).backward()
    seen.scaled.zero_grad()
    other = nn.Linear(15, 2)
    scaler.scale(other(X).sum()).backward()  # of a model that is not distributed
    assert torch.equal(other.bias.grad, torch.full((2,), 2 * 65536.0))
    other.zero_grad()
    scaler.scale(checkpoint(other, X.clone().requires_grad_(), use_reentrant=True).sum()).backward()
    assert torch.equal(other.bias.grad, torch.full((2,), 2 * 65536.0))
    seen.compare(implicit)


def a_part(scaler, loss):
    (scaler.scale(loss) / 2).backward()


def in_a_list(scaler, loss):
    torch.autograd.backward(scaler.scale([loss, loss * 2]))


@pytest.mark.parametrize("write", [a_part, in_a_list])
def test_a_grad_scaler_is_refused_however_the_loss_is_written(write):
    seen = Seen()
    before = weights(seen.scaled)
    scaler, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    for call in (scaler.unscale_, scaler.step):
        write(scaler, seen.scaled(X).sum())
        with pytest.raises(sherd.ConfigError, match=r"rank 0: a GradScaler was given .*write loss.backward\(\)"):
            call(seen.optimizers[1])
        seen.scaled.zero_grad()
    same(weights(seen.scaled), before)
    write(scaler, seen.plain(X).sum())  # which is not distributed
    scaler.unscale_(seen.optimizers[0])
    scaler.step(seen.optimizers[0])
    scaler.update()
    seen.plain.zero_grad()
    write(off, seen.scaled(X).sum())
    off.unscale_(seen.optimizers[1])
    off.step(seen.optimizers[1])
    off.update()
    assert not torch.equal(seen.scaled[0].weight, before["0.weight"])


def test_models_of_a_process_share_one_scale():
    seen = Seen()
    with pytest.raises(sherd.ConfigError, match=r"another model of this process has LossScale\(initial=4096"):
        sherd.distribute(network(), loss_scale=sherd.LossScale())
    other = sherd.distribute(network(), loss_scale=sherd.LossScale(initial=S))
    engines = [model._sherd_training.engine for model in (seen.scaled, other)]
    assert engines[0].scale is engines[1].scale
    del seen, other, engines
    gc.collect()
    last = sherd.distribute(network(), loss_scale=sherd.LossScale())  # nobody uses the other one any more
    assert last._sherd_training.engine.scale.value == 2.0**16


@pytest.fixture
def uncollected():
    """Nothing collects garbage by chance."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_a_run_does_not_go_on_with_the_scale_of_one_that_is_over():
    def run(initial):
        model = network()
        optimizer = sgd(model)
        sherd.distribute(model, optimizer, loss_scale=sherd.LossScale(initial=initial))
        for step in range(3):
            (model(X).square().mean() * (float("inf") if step == 0 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        scale = model._sherd_training.engine.scale
        return scale.value, scale.total_overflows

    assert run(S) == (S / 2, 1)
    assert run(S) == (S / 2, 1), "the same run again"
    assert run(S / 4) == (S / 8, 1), "and one with another scale"


def test_a_failed_distribute_leaves_no_scale_behind(monkeypatch):
    def fail(*_):
        assert scaled_roots._process.followed
        raise ZeroDivisionError

    monkeypatch.setattr(apply, "share_statistics", fail)
    model = network()
    with pytest.raises(ZeroDivisionError) as kept:  # with all that its frames hold
        sherd.distribute(model, sgd(model), loss_scale=sherd.LossScale(initial=S))
    assert not scaled_roots._process.followed, kept


@pytest.mark.parametrize("strategy", ["local-sgd", "diloco", "gossip"])
def test_strategies_that_average_are_refused(strategy):
    model = network()
    with pytest.raises(sherd.ConfigError, match=rf"loss_scale= does not work with strategy='{strategy}'.*zero2"):
        sherd.distribute(model, sgd(model), strategy=strategy, loss_scale=sherd.LossScale())


def test_errors_of_torch_stay_those_of_torch():
    seen = Seen()
    for wrong, says in (
        (lambda out: out.backward(), "grad can be implicitly created only for scalar outputs"),
        (lambda out: torch.autograd.backward([out, out], [torch.ones(2, 5)]), "got 2 tensors and 1 gradients"),
        (lambda out: out.backward(torch.ones(3)), "Mismatch in shape"),
        (lambda out: out.sum().detach().backward(), "does not require grad"),
        (lambda out: torch.autograd.backward(), "missing 1 required positional argument"),
    ):
        with pytest.raises((RuntimeError, TypeError), match=says):
            wrong(seen.scaled(X))
    seen.compare(implicit)


def test_weights_after_steps_are_those_without_a_scale():
    seen = Seen(growth_interval=2)
    for _ in range(6):
        for model, optimizer in zip((seen.plain, seen.scaled), seen.optimizers, strict=True):
            implicit(model)
            optimizer.step()
            optimizer.zero_grad()
    same(weights(seen.scaled), weights(seen.plain))
    assert "loss scale 32,768, 0 steps after" in sherd.describe(seen.scaled)
