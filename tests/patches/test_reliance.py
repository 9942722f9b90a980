"""What the patches rely on is there: a release of torch that moved it fails here, before anybody trains on it."""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

from sherd import patches

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
NAMES = sorted(name for name in patches.PATCHES)
RELIED_ON = [(name, place) for name in NAMES for place in patches.patch(name).RELIES_ON]


def parameters(thing):
    """Names of the parameters of a function or of what it is wrapped in; of a class, those of its constructor."""
    return [*inspect.signature(thing).parameters]


@pytest.mark.parametrize(("name", "place"), RELIED_ON, ids=lambda each: each)
def test_torch_has_what_a_patch_relies_on(name, place):
    expected = patches.patch(name).RELIES_ON[place]
    found = pkgutil.resolve_name(place)
    if expected is None:
        return
    expected = expected.split()
    if expected[-1:] == ["..."]:
        expected.pop()
        assert parameters(found)[: len(expected)] == expected
    else:
        assert parameters(found) == expected


def test_a_place_that_moved_is_noticed():
    with pytest.raises(AttributeError):
        pkgutil.resolve_name("torch.autograd:backwards")
    with pytest.raises(ModuleNotFoundError):
        pkgutil.resolve_name("torch.autograde:backward")
    assert parameters(torch.autograd.backward) != ["tensors"]


def test_attributes_that_have_no_place():
    """What torch sets on objects, or looks for on them, is found only by doing it."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    class Scheduler(torch.optim.lr_scheduler.LRScheduler):
        def step(self, epoch=None):
            seen.append(self._is_initial)

    Scheduler(optimizer).step()
    assert seen == [True, False]  # what tells the first step, which a scheduler takes when it is built
    assert optimizer.step._wrapped_by_lr_sched
    assert type(optimizer).step.hooked
    assert hasattr(optimizer, "_opt_called") is False
    optimizer.step()
    assert optimizer._opt_called

    loader = torch.utils.data.DataLoader([1, 2, 3], num_workers=0)
    assert loader._iterator is None
    assert list(iter(loader)._sampler_iter) == [[0], [1], [2]]


def test_the_releases_that_pyproject_admits_are_those_checked():
    bounds = re.search(r'"torch>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    lowest, above = bounds.groups()
    assert lowest == patches.CHECKED_TORCH[0]
    major, minor = map(int, patches.CHECKED_TORCH[-1].split("."))
    assert above == f"{major}.{minor + 1}"
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned.group(1) == patches.CHECKED_TORCH[-1]
    assert re.match(r"\d+\.\d+", torch.__version__).group() in patches.CHECKED_TORCH, (
        f"torch {torch.__version__} was not checked: where the tests of this file and all others pass with it, add it "
        f"to CHECKED_TORCH and move the bound in pyproject.toml"
    )
