"""Which optimizers may be stepped in parts."""

from __future__ import annotations

import copy
import random
import re

import pytest
import torch
from torch import nn, optim

from sherd.engine.optimizer.elementwise import why_not_elementwise

pytestmark = pytest.mark.pure

EVERY_CLASS = {
    name: kind
    for name, kind in vars(optim).items()
    if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
}
NOT_ELEMENTWISE = {
    "Adafactor": "treats a parameter as a whole",
    "LBFGS": r"step\(\) needs a closure",
    "Muon": "parameters of a certain shape.*ValueError: .*2D",
    "SparseAdam": "more than parameters with dense gradients.*RuntimeError: .*dense gradients",
}


def parameters(*shapes, dtype=torch.float32):
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


def assert_why_not(optimizer, pattern):
    why_not = why_not_elementwise(optimizer)
    assert why_not is not None, pattern
    assert re.search(pattern, f"{why_not.cause}: {why_not.own_words}"), why_not


@pytest.mark.parametrize("name", EVERY_CLASS)
def test_every_class_of_torch(name):
    shapes = ((8, 16),) if name in ("LBFGS", "Muon") else ((8, 16), (), (16,), (2, 3, 4), (2, 3, 4, 5), (0, 3))
    optimizer = EVERY_CLASS[name](parameters(*shapes))
    if name in NOT_ELEMENTWISE:
        assert_why_not(optimizer, NOT_ELEMENTWISE[name])
    else:
        assert why_not_elementwise(optimizer) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}, {"lr": torch.tensor(0.1)}], ids=str)
@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad])
def test_implementations_and_dtypes(kind, how, dtype):
    assert why_not_elementwise(kind(parameters((8, 16), (4,), dtype=dtype), **how)) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("name", [name for name in EVERY_CLASS if name not in NOT_ELEMENTWISE])
def test_every_elementwise_class_in_other_dtypes(name, dtype):
    assert why_not_elementwise(EVERY_CLASS[name](parameters((8, 16), (4,), dtype=dtype))) is None


def test_options_decide_group_by_group():
    groups = [{"params": parameters((3, 3))}, {"params": parameters((3, 3)), "trust": True}]
    assert why_not_elementwise(Trusting(groups[:1])) is None
    assert_why_not(Trusting(groups), "treats a parameter as a whole")


def test_a_rate_of_zero_hides_nothing():
    optimizer = optim.Adafactor(parameters((8, 16)))
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    assert_why_not(optimizer, "treats a parameter as a whole")
    warming = optim.AdamW(parameters((8, 16)))
    optim.lr_scheduler.LambdaLR(warming, lambda step: step / 10)
    assert why_not_elementwise(warming) is None


class Trusting(optim.Optimizer):
    """SGD, in a group with trust scaled by a norm: of each tensor, or of all."""

    def __init__(self, params, lr=0.1, trust=False, over_all=False):
        super().__init__(params, {"lr": lr, "trust": trust})
        self.over_all = over_all

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            total = torch.stack([p.grad.square().sum() for p in group["params"]]).sum() if self.over_all else 0
            for parameter in group["params"]:
                norm = total if self.over_all else parameter.grad.square().sum()
                parameter -= group["lr"] * parameter.grad / (norm if group["trust"] else 1)


def test_a_norm_over_all_parameters_is_found_out():
    groups = [{"params": parameters((3, 3), (5,)), "trust": True}]
    assert_why_not(Trusting(groups, over_all=True), "treats a parameter as a whole")


class Noisy(optim.SGD):
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data += torch.randn_like(parameter) * random.random()


class Elsewhere(optim.SGD):
    """Steps a list of its own."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.mine = [parameter for group in self.param_groups for parameter in group["params"]]

    def step(self):
        for parameter in self.mine:
            parameter.data.add_(1)


class Nested(optim.SGD):
    def step(self):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moments"] = [torch.zeros_like(parameter)]


def test_random_stray_and_nested_ones_are_refused():
    assert_why_not(Noisy(parameters((3, 3)), lr=0.1), "it is random")
    stray = Elsewhere(parameters((3, 3)))
    assert_why_not(stray, "tensors that are not in its groups")
    assert torch.equal(stray.mine[0].detach(), torch.ones(3, 3))
    assert_why_not(Nested(parameters((3, 3)), lr=0.1), "inside a list or dict")


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adagrad, Noisy])
def test_nothing_is_disturbed(kind):
    optimizer = kind(parameters((8, 16), (4,)), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: pytest.fail("the user's hooks have nothing to do with it"))
    optimizer.param_groups[0]["mutable"] = [1]
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, 2.0)
    before = repr((optimizer.state_dict(), vars(optimizer).keys(), optimizer.param_groups))
    rng, python = torch.get_rng_state(), random.getstate()
    why_not_elementwise(optimizer)
    assert torch.equal(torch.get_rng_state(), rng)
    assert random.getstate() == python
    assert repr((optimizer.state_dict(), vars(optimizer).keys(), optimizer.param_groups)) == before
    for parameter in optimizer.param_groups[0]["params"]:
        assert torch.equal(parameter.detach(), torch.ones_like(parameter))
        assert torch.equal(parameter.grad, torch.full_like(parameter, 2.0))


def test_state_that_is_there_already_is_lent_to_the_probes():
    for kind in (optim.AdamW, optim.Adagrad, optim.NAdam):
        optimizer = kind(parameters((8, 16), (4,)))
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        before = copy.deepcopy(optimizer.state_dict())
        assert why_not_elementwise(optimizer) is None
        assert repr(optimizer.state_dict()) == repr(before)


class EarlyState(optim.SGD):
    """Makes its state when it is built, and counts on it."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"scale": torch.full_like(parameter, 0.5), "step": torch.tensor(0.0)}

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["step"] += 1
            parameter -= parameter.grad * self.state[parameter]["scale"]


def test_state_made_by_init():
    assert why_not_elementwise(EarlyState(parameters((8, 16)))) is None


class Orthogonalised(optim.SGD):
    """Counts on matrices, and says so in its own way."""

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter -= parameter.grad / max(parameter.shape[-2], parameter.shape[-1])


class Sharpness(optim.SGD):
    """Says only when it is called that it wants a closure."""

    def step(self, closure=None):
        assert closure is not None, "a closure is required"


def test_an_exception_of_the_optimizers_own_is_told_as_its_own():
    why_not = why_not_elementwise(Orthogonalised(parameters((8, 16)), lr=0.1))
    assert "shape" in why_not.cause
    assert 'strategy="ddp"' in why_not.fix
    assert why_not.own_words == "IndexError: tuple index out of range"
    why_not = why_not_elementwise(Sharpness(parameters((8, 16)), lr=0.1))
    assert "needs a closure" in why_not.cause
    assert why_not.own_words == "AssertionError: a closure is required"


class LargeOnly(optim.SGD):
    """Normalises matrices whose sides are both long."""

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            large = parameter.dim() == 2 and min(parameter.shape) >= 128
            parameter -= parameter.grad / (parameter.grad.norm() if large else 1)


def test_rules_for_large_matrices_count_where_there_are_any():
    assert why_not_elementwise(LargeOnly(parameters((8, 16)), lr=0.1)) is None
    assert_why_not(LargeOnly(parameters((8, 16), (200, 128)), lr=0.1), "treats a parameter as a whole")


def test_a_compiled_step_is_tried_without_compiling():
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    class Compiled(optim.SGD):
        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                move(parameter, parameter.grad)

    move = torch.compile(lambda parameter, gradient: parameter.sub_(gradient), backend=backend)
    assert why_not_elementwise(Compiled(parameters((8, 16)), lr=0.1)) is None
    assert not compiled
    with torch.no_grad():
        move(torch.ones(3), torch.ones(3))
    assert compiled
