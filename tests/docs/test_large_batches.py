"""The page about large batches: its picture, and what it says about arguments and memory."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

import pytest
import torch

from sherd.layout.placement import BLOCK
from sherd.optim import LAMB, LARS, layerwise

pytestmark = pytest.mark.fake

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/large-batches.md").read_text()


def test_the_picture_is_what_its_script_draws():
    drawn = runpy.run_path(str(ROOT / "docs/images/large_batches.py"))["picture"]()
    assert (ROOT / "docs/images/large_batches.svg").read_text() == drawn, "run python docs/images/large_batches.py"


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_the_defaults_are_those_of_the_classes(kind):
    told = re.search(rf"`{kind.__name__}\(params, (.+)\)`:", PAGE)[1]
    found = dict(re.findall(r"(\w+)=(\([^)]+\)|[^,]+)", told))
    assert len(found) >= 4
    for name, value in found.items():
        assert inspect.signature(kind).parameters[name].default == eval(value), name


def test_bytes():
    assert 4 * BLOCK == 2 * 8 * 64  # 16 bytes for every block: 1/64 of its fp32 parameters
    assert 4 * layerwise.PIECE == 1 << 20
    parameter = torch.nn.Parameter(torch.ones(1000, 10))
    for kind, expected in ((LARS, 4), (LAMB, 8)):
        parameter.grad = torch.ones_like(parameter)
        optimizer = kind([parameter], lr=0.1)
        optimizer.step()
        kept = sum(value.nbytes for value in optimizer.state[parameter].values() if value.dim())
        assert kept == expected * parameter.numel()
