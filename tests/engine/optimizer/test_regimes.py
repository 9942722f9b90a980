"""Rules for whole tensors that hold under a condition only, which random gradients do not meet."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from sherd.engine.optimizer import elementwise
from sherd.engine.optimizer.elementwise import why_not_elementwise

pytestmark = pytest.mark.pure


class Conditional(optim.Optimizer):
    """SGD with momentum and decay, but for the tensors that a rule says something else about."""

    def __init__(self, params, rule):
        super().__init__(params, {"lr": 0.1})
        self.rule = rule

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(step=0, momentum=torch.zeros_like(parameter), first=parameter.clone())
            state["step"] += 1
            if not self.rule(parameter, parameter.grad, state):
                state["momentum"].mul_(0.9).add_(parameter.grad)
                parameter.mul_(0.999).sub_(state["momentum"], alpha=self.param_groups[0]["lr"])


def cosine(some, other, dim=None):
    some, other = (x.flatten() if dim is None else x for x in (some, other))
    return nn.functional.cosine_similarity(some, other, dim=0 if dim is None else dim)


def project(dim):
    def rule(weight, gradient, state):
        if weight.dim() > 1 and cosine(weight, gradient, dim).abs().max() < 0.01:
            gradient -= weight * (gradient.sum() / weight.sum())

    return rule


def by_channel(weight, gradient, state):
    if weight.dim() == 4 and cosine(weight.flatten(1), gradient.flatten(1), 1).abs().max() < 0.01:
        gradient /= gradient.norm()


def in_all_of_large_ones(weight, gradient, state):
    if cosine(weight, gradient).abs() < 1e-5 and gradient.norm() > 0:
        gradient /= gradient.norm()


def adapt(weight, gradient, state):
    """A rate that grows as long as the way leads on, as of D-Adaptation and Prodigy."""
    state["way"] = max(state.get("way", 0.0), (gradient * (state["first"] - weight)).sum().item() - 30 * weight.numel())
    gradient *= 1 + state["way"]


def tenth(weight, gradient, state):
    if state["step"] % 10 == 0:
        gradient /= gradient.norm()


RULES = {
    "orthogonal by rows": project(1),
    "orthogonal by columns": project(0),
    "orthogonal by channels": by_channel,
    "orthogonal in all": in_all_of_large_ones,
    "parallel": lambda weight, gradient, state: cosine(weight, gradient) > 0.7,
    "opposed": lambda weight, gradient, state: cosine(weight, gradient) < -0.7,
    "no gradient": lambda weight, gradient, state: not gradient.any(),
    "no weight": lambda weight, gradient, state: not weight.any(),
    "constant gradient": lambda weight, gradient, state: weight.dim() and gradient.std() == 0,
    "small gradient": lambda weight, gradient, state: weight.dim() and gradient.norm() < 1e-3,
    "large gradient": lambda weight, gradient, state: gradient.norm() > 2e4,
    "large for the weight": lambda weight, gradient, state: weight.dim() and gradient.norm() > 1e5 * weight.norm(),
    "sparse": lambda weight, gradient, state: weight.dim() and (gradient == 0).float().mean() > 0.95,
    "turned": lambda weight, gradient, state: cosine(state["momentum"], gradient) < -0.3,
    "going on": lambda weight, gradient, state: cosine(state["momentum"], gradient) > 0.9,
    "adapting": adapt,
    "every tenth step": tenth,
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_under_a_condition_is_found_out(name, monkeypatch):
    shapes = ((8, 16), (16,), (8, 3, 5, 5))
    optimizer = Conditional([nn.Parameter(torch.ones(shape)) for shape in shapes], RULES[name])
    why_not = why_not_elementwise(optimizer)
    assert why_not is not None
    assert "treats a parameter as a whole" in why_not.cause
    monkeypatch.setattr(elementwise, "SPECIAL", ())
    assert why_not_elementwise(optimizer) is None, "random gradients would have done"
