"""Every optimizer of torch and of timm under ZeRO: it has the bits of ddp, or it is refused.

One that draws random numbers has other bits than under ddp: of each parameter, only the owner draws.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

import pytest
import torch
from torch import nn, optim

import sherd
from sherd import ConfigError
from tests.helpers.training import connected, differ, same, weights

STEPS = 8
RANDOM = {"kron", "kronc", "kronw"}
TORCH = tuple(
    name
    for name, kind in vars(optim).items()
    if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
)


def scale_invariant():
    """Norms after convolutions and linears, as in most models: there a gradient is orthogonal to its weight."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(8 * 4 * 4, 30, bias=False), nn.LayerNorm(30), nn.Tanh(), nn.Linear(30, 7)),
    )


def trained(c, make, strategy):
    model = scale_invariant()
    optimizer = make(model)
    sherd.distribute(model, optimizer, strategy=strategy, comm=c)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + c.rank)
        x, y = torch.randn(4, 3, 8, 8, generator=generator), torch.randint(7, (4,), generator=generator)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def right_or_refused(makers):
    """The names of those that have the bits of ddp, and of those that are refused. There are no others."""
    right, refused = [], []
    with connected() as c, torch.compiler.set_stance("force_eager"):  # kron would compile its step for a minute
        for name, make in makers.items():
            try:
                found = trained(c, make, "zero2")
            except ConfigError as error:
                assert f"{type(make(scale_invariant())).__name__} cannot be sharded: " in str(error)
                refused.append(name)
                continue
            assert differ(found, weights(scale_invariant())), name
            if name in RANDOM:
                everybody = c.all_gather_object(found)
                same(everybody[0], everybody[1], name)
            else:
                same(found, trained(c, make, "ddp"), name)
            right.append(name)
    return right, refused


def of_torch(model, name):
    kind = getattr(optim, name)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    return kind(matrices if name == "Muon" else model.parameters(), lr=0.01)


def every_one_of_torch():
    return right_or_refused({name: lambda model, name=name: of_torch(model, name) for name in TORCH})


def test_every_optimizer_of_torch(ranks):
    for right, refused in ranks(2).run(every_one_of_torch):
        assert sorted(refused) == ["LBFGS", "SparseAdam"]
        assert sorted(right + refused) == sorted(TORCH)


def timm_optim():
    """`timm.optim` without the rest of timm, which needs torchvision and with it gigabytes."""
    package, models = types.ModuleType("timm"), types.ModuleType("timm.models")
    package.__path__ = importlib.util.find_spec("timm").submodule_search_locations
    models.group_parameters = None  # for rates by layer, which nobody asks for here
    sys.modules.update({"timm": package, "timm.models": models})
    try:
        return importlib.import_module("timm.optim")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
            del sys.modules[name]  # others look there for the real one


def those_of_timm(names=()):
    """Of these names, or of all."""
    timm = timm_optim()
    makers = {}
    for name in names or timm.list_optimizers():

        def make(model, name=name):
            return timm.create_optimizer_v2(model, name, lr=0.01, weight_decay=0.05)  # two groups: one has no decay

        try:
            make(scale_invariant())
        except (AssertionError, ImportError):  # needs CUDA, or another package
            continue
        makers[name] = make
    return right_or_refused(makers)


needs_timm = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None, reason="needs timm: pip install --no-deps timm"
)
RIGHT = {"adamw", "adan", "adopt", "lion", "madgrad", "nadamw", "radam", "rmsproptf", "sgdw"}
WHOLE = {"adafactorbv", "adamp", "cadamw", "kron", "lars", "mars", "muon", "novograd", "sgdp"}
REFUSED = {"adahessian", "lamb"}


@needs_timm
def test_optimizers_of_timm(ranks):
    for right, refused in ranks(2).run(those_of_timm, sorted(RIGHT | WHOLE | REFUSED)):
        assert (set(right), set(refused)) == (RIGHT | WHOLE, REFUSED)


@needs_timm
@pytest.mark.fuzz
def test_every_optimizer_of_timm(ranks):
    for right, refused in ranks(2).run(those_of_timm):
        assert set(right) >= RIGHT | WHOLE
        assert all(name == "adahessian" or name.removeprefix("c").startswith("lamb") for name in refused), refused
