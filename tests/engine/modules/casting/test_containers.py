"""What is cast of the inputs and outputs of a module: floats, in containers of many kinds."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from torch import nn

from tests.engine.modules.casting.models import BF16, FP32, cast_model

pytestmark = pytest.mark.pure
FP64 = torch.float64


class Pair(NamedTuple):
    a: torch.Tensor
    b: object


@dataclass(frozen=True)
class Record:
    a: torch.Tensor
    b: object = None


class Output(collections.OrderedDict):
    """As of a library: an ordered dict with attributes."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Echo(nn.Module):
    """Returns what it is given."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *args, **options):
        self.args, self.options = args, options
        return args, options


def dtypes_in(value):
    """A structure with dtypes for tensors."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, Record):
        return Record(dtypes_in(value.a), dtypes_in(value.b))
    if isinstance(value, Pair):
        return Pair(*map(dtypes_in, value))
    if isinstance(value, tuple | list):
        return type(value)(map(dtypes_in, value))
    if isinstance(value, collections.abc.Mapping):
        return {key: dtypes_in(item) for key, item in value.items()}
    return value


def test_containers():
    model, x = cast_model(Echo()), torch.randn(2)
    special = object()
    inputs = {
        "tensor": x,
        "wide": x.double(),
        "whole": torch.arange(2),
        "mask": x > 0,
        "complex": x.to(torch.complex64),
        "tiny": x.to(torch.float8_e4m3fn),
        "tuple": (x, [x, None, 3]),
        "pair": Pair(x, "b"),
        "record": Record(x, {"deep": x}),
        "mapping": collections.OrderedDict(a=x, b=1),
        "proxy": MappingProxyType({"a": x}),
        "other": special,
    }
    expected = {
        **inputs,
        "whole": torch.int64,
        "mask": torch.bool,
        "complex": torch.complex64,
        "tiny": torch.float8_e4m3fn,
    }

    def of(dtype):
        return {
            **expected,
            "tensor": dtype,
            "wide": dtype,
            "tuple": (dtype, [dtype, None, 3]),
            "pair": Pair(dtype, "b"),
            "record": Record(dtype, {"deep": dtype}),
            "mapping": {"a": dtype, "b": 1},
            "proxy": {"a": dtype},
        }

    args, options = model(inputs, *inputs.values(), **inputs)
    assert dtypes_in(model.options) == of(BF16)
    assert dtypes_in(model.args) == (of(BF16), *of(BF16).values())
    assert dtypes_in(options) == of(FP32) and dtypes_in(args) == (of(FP32), *of(FP32).values())
    assert model.options["other"] is special and type(model.options["mapping"]) is collections.OrderedDict
    assert inputs["record"].a is x, "the caller's containers are as they were"


def test_outputs_with_attributes_keep_their_class_and_shared_tensors():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            y = self.layer(x)
            output = Output()
            output["last"], output["all"] = y, (y, y)
            return output

    output = cast_model(Model())(torch.randn(3, 2))
    assert type(output) is Output and output.last is output["last"] and output.last.dtype is FP32
    assert output["all"][0] is output.last


def test_fp64_that_a_model_returns_and_dtypes_that_fit_are_left_alone():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x, options):
            self.options = options
            return self.layer(x).double(), self.layer(x).argmax()

    model, options = cast_model(Model()), {"ids": torch.arange(3), "fits": torch.ones(2, dtype=BF16)}
    wide, whole = model(torch.randn(3, 2), options)
    assert wide.dtype is FP64 and whole.dtype is torch.int64
    assert model.options is options, "containers in which all fits are passed on"
