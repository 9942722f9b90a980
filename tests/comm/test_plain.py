"""Plain data: they come back as they were, and bytes that a stranger wrote do nothing but raise our error."""

from __future__ import annotations

import enum
import math
import pickle
import struct
import tracemalloc
from collections import OrderedDict, namedtuple

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from sherd.comm.trust.plain import NUMBERS, NotPlain, dumps, loads
from sherd.errors import CommError
from sherd.layout.entry import ITEMSIZE

pytestmark = pytest.mark.pure

DTYPES = (*ITEMSIZE, "float8_e8m0fnu")
DEVICES = ("cpu", "cuda:1", "meta", "cuda")


def same(one, other):
    """Equal in every respect: types, signs of zeros, order of keys, bytes of tensors."""
    if type(one) is not type(other):
        return False
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) in (set, frozenset):
        return len(one) == len(other) and all(any(same(each, their) for their in other) for each in one)
    if type(one) is dict:
        return same(list(one.items()), list(other.items()))
    if type(one) is Tensor:
        return (one.dtype, one.shape) == (other.dtype, other.shape) and same(bits(one), bits(other))
    if type(one) is float:
        return struct.pack("<d", one) == struct.pack("<d", other)
    if type(one) is complex:
        return same([one.real, one.imag], [other.real, other.imag])
    if isinstance(one, numpy.ndarray | numpy.generic):
        return (one.dtype.char, one.shape, one.tobytes()) == (other.dtype.char, other.shape, other.tobytes())
    return one == other


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@st.composite
def tensors(draw):
    dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    data = draw(st.binary(min_size=math.prod(shape) * dtype.itemsize, max_size=math.prod(shape) * dtype.itemsize))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    tensor = flat.view(shape)
    return tensor.movedim(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


@st.composite
def numbers(draw):
    dtype = numpy.dtype(draw(st.sampled_from(NUMBERS)))
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    array = numpy.array(draw(st.integers(0, 100)), dtype) * numpy.ones(shape, dtype)
    return numpy.asarray(array, dtype) if draw(st.booleans()) else dtype.type(draw(st.integers(0, 1)))


hashable = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(1 << 63, 1 << 300) | st.integers(-(1 << 300), -(1 << 63)),
        st.floats(),
        st.complex_numbers(),
        st.text() | st.just("\ud800"),
        st.binary(),
        st.sampled_from([getattr(torch, name) for name in DTYPES]),
        st.sampled_from([torch.device(name) for name in DEVICES]),
        st.lists(st.integers(0, 1 << 62), max_size=3).map(torch.Size),
    ),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
plain = st.recursive(
    hashable | tensors() | numbers() | st.lists(st.integers(-(1 << 64), 1 << 64)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(hashable, inner, max_size=4),
        st.sets(hashable, max_size=4),
    ),
    max_leaves=12,
)


@given(plain)
@example([True, 1, 1.0, -0.0, math.nan, (1,), [1], {1: True}, {"b": 1, "a": 2}, set(), frozenset()])
@example([0, -1, 127, 128, -(1 << 63), (1 << 63) - 1])
@example([0, 1 << 63])
def test_plain_data_come_back_as_they_were(value):
    assert same(loads(dumps(value)), value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t()[::2],
        torch.tensor(3.0),
        torch.empty(0, 5),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,  # a negative view
        torch.ones(2, requires_grad=True) * 2,
        torch.ones(1).expand(3),
    ],
)
def test_tensors_of_every_kind_of_memory(tensor):
    back = loads(dumps(tensor))
    assert back.equal(tensor) and back.dtype == tensor.dtype and back.is_contiguous() and not back.requires_grad
    back.add_(1)  # it is nobody else's memory


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        object(),
        len,
        Colour.RED,
        namedtuple("Pair", "a b")(1, 2),
        OrderedDict(a=1),
        type("Text", (str,), {})("x"),
        nn.Parameter(torch.ones(1)),
        torch.ones(1, device="meta"),
        torch.ones(2).to_sparse(),
        torch.empty(1, dtype=torch.bits8),
        numpy.array([object()]),
        numpy.array([1], ">i4"),
        numpy.random.default_rng(0),
        slice(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_refused_by_its_type(value):
    for whole in (value, [1, {"a": (value,)}]):
        with pytest.raises(NotPlain, match=type(value).__name__):
            dumps(whole)


def test_endless_nesting_is_refused_on_both_sides():
    endless = []
    endless.append(endless)
    with pytest.raises(NotPlain, match="inside 100 others"):
        dumps(endless)
    with pytest.raises(CommError, match="more than 100"):
        loads(b"l\1" * 100_000 + b"N")


@given(st.binary())
@example(pickle.dumps(1))
def test_garbage_does_nothing(garbage):
    read(garbage)


@given(plain, st.data())
def test_damaged_data_do_nothing(value, data):
    damaged = bytearray(dumps(value))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        if data.draw(st.booleans()):
            damaged[place] = data.draw(st.integers(0, 255))
        else:
            damaged[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        damaged = damaged or bytearray(b"?")
    read(bytes(damaged))


@given(st.sampled_from(sorted(set("NTFifcsblqtSZdzyvxan"))), st.binary(max_size=40))
def test_each_letter_minds_what_follows(letter, rest):
    read(letter.encode() + rest)


def read(data):
    """It returns what can be sent again, or raises our error."""
    try:
        value = loads(data)
    except CommError:
        return
    dumps(value)


HUGE = bytes([255] * 8 + [127])


@pytest.mark.parametrize("letter", "ifcsblqtSZdzyvxan")
def test_no_size_is_believed(letter):
    dtype = b"\x0dtorch.float32" if letter == "x" else b"\1d" if letter in "an" else b""
    claims = struct.pack("<q", 10**12)
    bodies = [HUGE, HUGE + b"x" * 100, dtype + b"\x08" + claims + HUGE, dtype + b"\x08" + claims + b"\4abcd"]
    tracemalloc.start()
    try:
        for body in bodies:
            read(letter.encode() + body)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("item", [b"N", b"S\0", b"d\0", b"l\0", b"s\0"])
def test_what_is_read_takes_room_in_proportion(item):
    many = 30_000
    data = bytearray(b"l")
    size = many
    while size > 127:
        data.append(size & 127 | 128)
        size >>= 7
    data.append(size)
    data += item * many
    tracemalloc.start()
    try:
        assert len(loads(bytes(data))) == many
        assert tracemalloc.get_traced_memory()[1] < 150 * len(data)
    finally:
        tracemalloc.stop()
