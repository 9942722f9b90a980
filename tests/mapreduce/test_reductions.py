"""What may be reduced, and to what."""

from __future__ import annotations

import enum
import math
import operator

import numpy
import pytest
import torch

from sherd.errors import ConfigError
from sherd.mapreduce import keys
from sherd.mapreduce.reductions import reduction_of

pytestmark = pytest.mark.pure


def over(values, how):
    reduction = reduction_of(how)
    first, *others = map(reduction.start, values)
    for other in others:
        first = reduction.merge(first, other)
    return reduction.finish(first, len(values))


def test_numbers():
    assert over([1, 2, 4], "sum") == 7 and type(over([1, 2], "sum")) is int
    assert over([True, True, False], "sum") == 2
    assert over([1, 2], "mean") == 1.5
    assert over([1.5, numpy.float32(2.0)], "sum") == 3.5
    assert over([1, 5, 3], "max") == 5
    assert math.isnan(over([1.0, math.nan, 3.0], "max")) and math.isnan(over([math.nan, 3.0], "max"))
    assert over([2, 3, 7], operator.mul) == 42


def test_structures():
    values = [{"a": torch.tensor([1.0, 2.0]), "b": (1, [2.5])}, {"a": torch.tensor([3.0, 1.0]), "b": (2, [0.5])}]
    found = over(values, "sum")
    assert found["a"].tolist() == [4.0, 3.0] and found["b"] == (3, [3.0]) and list(found) == ["a", "b"]
    assert over(values, "max")["a"].tolist() == [3.0, 2.0]
    assert values[0]["a"].tolist() == [1.0, 2.0], "the user's tensors are left alone"


def test_dtypes():
    ones = [torch.ones(2, dtype=torch.float16) * 1000] * 100
    assert over(ones, "mean").tolist() == [1000.0, 1000.0], "the sum does not fit into float16, and need not"
    assert over(ones, "mean").dtype == torch.float16
    assert over([torch.ones(2, dtype=torch.bool)] * 3, "sum").tolist() == [3, 3]
    assert over([torch.tensor(200, dtype=torch.uint8)] * 2, "sum").item() == 400
    assert over([torch.tensor(1), torch.tensor(2)], "mean").item() == 1.5
    array = over([numpy.ones(2, numpy.float32), numpy.ones(2, numpy.float32)], "sum")
    assert isinstance(array, numpy.ndarray) and array.dtype == numpy.float32 and array.tolist() == [2, 2]


def test_own_functions_get_what_another_rank_would():
    seen = []
    over([torch.randn(3, 2, requires_grad=True).t()] * 2, lambda a, b: seen.append((a, b)) or a)
    assert all(each.is_contiguous() and not each.requires_grad for each in seen[0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, torch.tensor(1)], r"returned a number for one item and a tensor of int64\[\] for a later one"),
        ([torch.ones(2), torch.ones(3)], r"a tensor of float32\[2\] for one item and a tensor of float32\[3\]"),
        ([{"a": 1}, {"b": 1}], r"\{'a': a number\} for one item and \{'b': a number\}"),
        ([None], "map_fn returned None, which cannot be added"),
        (["word"], "map_fn returned a str"),
    ],
)
def test_values_that_cannot_be_reduced(values, message):
    with pytest.raises(ConfigError, match=message):
        over(values, "sum")


@pytest.mark.parametrize(("how", "message"), [("men", "did you mean 'mean'"), (3, "got reduce=3; write 'sum'")])
def test_reductions_that_there_are_not(how, message):
    with pytest.raises(ConfigError, match=message):
        reduction_of(how)


class Colour(str, enum.Enum):
    RED = "red"


def test_keys():
    assert keys.checked((numpy.int64(3), None, "a", b"b", True)) == (3, None, "a", b"b", True)
    assert repr(keys.checked(Colour.RED)) == repr("red")
    assert keys.owner(1, 97) == keys.owner(True, 97) == keys.owner(1.0, 97), "one key of a dict has one owner"
    assert len({keys.owner(f"key {number}", 5) for number in range(100)}) == 5
    assert keys.owner("a", 1 << 30) == 738_452_900, "the same in every process, today and tomorrow"


@pytest.mark.parametrize("key", [math.nan, torch.tensor(1), [1], (1, {2}), object()])
def test_what_cannot_be_a_key(key):
    with pytest.raises(ConfigError, match="a key is a string, a number, bytes, None, or a tuple of those"):
        keys.checked(key)
