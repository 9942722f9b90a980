"""`Autocasting`: autocast in the forward, whichever module is entered, and fp32 outside."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from sherd.engine.modules.casting import Autocasting
from tests.engine.modules.casting.models import BF16, FP16, FP32, Transformer, conv, mlp, seen

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def _off_afterwards():
    yield
    assert not torch.is_autocast_enabled("cpu")


def autocast(model, dtype=BF16):
    casting = Autocasting([model], dtype)
    casting.install()
    return casting


def test_as_torch_does_inside_and_fp32_outside():
    model, plain, x = conv(), conv(), torch.randn(4, 3, 6, 6)
    casting = autocast(model)
    dtypes = seen(model)
    with torch.autocast("cpu", BF16):
        expected = plain(x)
    y = model(x)
    assert expected.dtype is BF16 and y.dtype is FP32 and torch.equal(y, expected.float())
    assert dtypes["0"] == (FP32, BF16) and dtypes["4"] == (BF16, BF16)
    y.square().mean().backward()
    expected.float().square().mean().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert model[0](x).dtype is FP32 and dtypes["0"] == (FP32, BF16), "a part is run in autocast too"
    casting.remove()
    assert model[0](x).dtype is FP32 and dtypes["0"] == (FP32, FP32)


def test_outputs_in_containers_and_generate():
    model, ids = Transformer(), torch.randint(11, (2, 5))
    autocast(model)
    output = model(ids, targets=ids)
    assert output["loss"].dtype is output["logits"].dtype is FP32
    model.generate(ids)
    assert model.dtypes == (FP32, FP32)


def test_autocast_of_the_users_own():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            x = self.a(x)
            with torch.autocast("cpu", enabled=False):
                x = self.b(x.float())
            return self.c(x)

    model, x = Model(), torch.randn(3, 2)
    autocast(model)
    dtypes = seen(model)
    model(x)
    assert [dtypes[name][1] for name in "abc"] == [BF16, FP32, BF16]
    with torch.autocast("cpu", FP16):
        assert model(x).dtype is FP32 and (x @ x.T).dtype is FP16
    assert dtypes["a"][1] is BF16, "inside, what the model was given"


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)])
def test_errors_leave_autocast_as_it_was(error):
    class Failing(nn.Module):
        def forward(self, x):
            raise self.error

    failing = Failing()
    model, x = nn.Sequential(nn.Linear(2, 2), failing), torch.randn(3, 2)
    autocast(model)
    failing.error = error
    with pytest.raises(type(error)):
        model(x)
    assert not torch.is_autocast_enabled("cpu") and (x @ x.T).dtype is FP32
    assert model[0](x).dtype is FP32


def test_copies():
    model, x = mlp(), torch.randn(4, 6)
    casting = autocast(model)
    expected = model(x)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    casting.remove()
    assert not torch.equal(model(x), expected)
    assert all(torch.equal(each(x), expected) for each in copies)
