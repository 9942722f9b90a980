"""Errors about dtypes name the innermost module and say what to write; others are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.engine.modules.casting.models import BF16, cast_model

pytestmark = pytest.mark.pure


class Mixing(nn.Module):
    """Multiplies by an fp32 matrix, or fails as it is told."""

    def __init__(self, parameters=True, error=None):
        super().__init__()
        self.layer = nn.Linear(2, 2) if parameters else nn.Identity()
        self.error = error
        self.matrix = torch.eye(2)

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return self.layer(x) @ self.matrix


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.first, self.inner = nn.Linear(2, 2), inner

    def forward(self, x):
        return self.inner(self.first(x))


def failure(model, kind=RuntimeError):
    with pytest.raises(kind) as caught:
        model(torch.randn(3, 2))
    return str(caught.value)


@pytest.mark.parametrize("parameters", [True, False])  # without, it has no hooks of its own
def test_the_innermost_module_is_named(parameters):
    model = cast_model(nn.Sequential(Outer(Mixing(parameters))))
    text = failure(model)
    with pytest.raises(RuntimeError) as plain:
        torch.ones(3, 2, dtype=BF16) @ torch.eye(2)
    assert text.startswith(str(plain.value)), "with the message of torch in full"
    assert text.count("This happened in") == 1
    assert "module '0.inner' (Mixing), with precision='bf16'" in text and "keep_fp32=[..., '0.inner']" in text
    kept = cast_model(nn.Sequential(Outer(Mixing(parameters))), keep=[..., "0.inner"])
    assert kept(torch.randn(3, 2)).dtype is torch.float32


def test_a_missing_kernel():
    class Solving(nn.Module):
        def forward(self, x):
            return torch.linalg.inv(x @ x.T)

    text = failure(cast_model(nn.Sequential(nn.Linear(2, 2), Solving())))
    assert "module '1' (Solving)" in text and "keep_fp32=[..., '1']" in text


def test_the_code_of_the_model_itself():
    text = failure(cast_model(Mixing()))
    assert "module '' (Mixing)" in text and "move that code into a module" in text and "keep_fp32" not in text


def test_modules_that_are_kept_or_were_added_later():
    assert "it is kept in fp32" in failure(
        cast_model(nn.Sequential(Mixing(error=TypeError("dtype?"))), ["0"]), TypeError
    )
    model = cast_model(nn.Sequential(nn.Linear(2, 2)))
    model.append(nn.Linear(2, 2))
    assert "module '1' (Linear)" in failure(model) and "added to the model after sherd.distribute" in failure(model)


@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), ValueError("dtype"), KeyError("dtype"), RuntimeError(), RuntimeError(3)]
)
def test_other_errors_are_left_alone(error):
    before = error.args
    failure(cast_model(nn.Sequential(Mixing(error=error))), type(error))
    assert error.args == before
