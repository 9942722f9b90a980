"""What a step costs, counted: by elements, and by the matrix products of optimizers that make some."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from sherd.engine.buckets.tracked import TrackedParameter
from sherd.engine.optimizer.elementwise import why_not_whole
from sherd.engine.optimizer.forecast import PER_ELEMENT, work_of
from tests.engine.optimizer.test_optimizers import Together

pytestmark = pytest.mark.pure


def tracked(*shapes):
    return [TrackedParameter(f"p{n}", nn.Parameter(torch.zeros(shape))) for n, shape in enumerate(shapes)]


def test_products_count_by_shape():
    shapes = ((64, 64), (16, 256), (256, 16), (4096,))
    members = tracked(*shapes)
    muon = optim.Muon([member.parameter for member in members[:3]])
    work = work_of(muon, members)
    square, wide, tall, vector = (work[member] - PER_ELEMENT * 4096 for member in members)
    assert square == 5 * (4 * 64 * 64 * 64 + 2 * 64**3), "five iterations of three products"
    assert wide == tall == 5 * (4 * 16 * 16 * 256 + 2 * 16**3)
    assert vector == 0, "which Muon cannot step"


def test_without_products_elements_count():
    members = tracked((64, 64), (16, 256), (3,))
    adafactor = optim.Adafactor([member.parameter for member in members])
    assert list(work_of(adafactor, members).values()) == [PER_ELEMENT * numel for numel in (4096, 4096, 256)]


def parameters(*shapes):
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


class Clipping(optim.SGD):
    """Clips by the norm of all gradients: a rule that only large gradients meet."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1e5)
        return super().step(closure)


def test_which_parameters_may_have_different_owners():
    matrices = parameters((8, 16), (16, 8))
    assert why_not_whole(optim.Muon(matrices)) is None
    assert why_not_whole(optim.Adafactor(parameters((8, 16), (4,)))) is None
    assert why_not_whole(optim.SGD(matrices, lr=0.1)) is None
    assert "needs a closure" in why_not_whole(optim.LBFGS(matrices)).cause
    for kind in (Together, Clipping):
        assert why_not_whole(kind(matrices, lr=0.1)).cause == "its step of one parameter depends on the others"
