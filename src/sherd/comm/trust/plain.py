"""Plain data as bytes, and back: unlike a pickle, reading it runs no code, whoever wrote it.

Plain are None, bool, int, float, complex, str, bytes, list, tuple, dict, set and frozenset, torch's dtype, device and
Size, dense tensors on the CPU, and numpy's numbers and arrays of them. They come back with their types:
True is not 1, a tuple is not a list. A tensor comes back contiguous and without `requires_grad`. Subclasses are not
plain: an enum or a named tuple would need its class.

A value is a letter for its type, then its data; sizes are LEB128. Invalid bytes raise `CommError`. No size is trusted
unless that many bytes are left, so what is read takes at most about a hundred times the memory of its bytes (for a list
of empty sets; long data takes a few times its own).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sherd.errors import CommError, ConfigError

DEEPEST = 100  # containers inside each other
MOST_DIMENSIONS = 64
NUMBERS = "?bBhHiIlLqQefdgFDG"  # numpy's letters for the kinds of numbers

_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
# The rest are quantised, which takes more than bytes, or cannot be copied by torch.
_OF_TENSORS = re.compile(r"torch\.(bool|bfloat16|u?int(8|16|32|64)|float(16|32|64|8_\w+)|complex\d+)")
_CONSTANTS: dict[Any, bytes] = {None: b"N", True: b"T", False: b"F"}
_LETTERS: dict[type, bytes] = {list: b"l", tuple: b"t", set: b"S", frozenset: b"Z", torch.Size: b"z"}
_CONTAINERS: dict[bytes, Any] = {letter: kind for kind, letter in _LETTERS.items()}


class NotPlain(ConfigError):
    """A value that is not plain data. `kind` names its type."""

    def __init__(self, kind: type, why: str = "") -> None:
        self.kind = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        super().__init__(f"a {self.kind} is not plain data{why}")


def dumps(value: Any) -> bytes:
    """`value` as bytes; `NotPlain` if it is, or holds, anything but plain data."""
    out = bytearray()
    _put(out, value, 0)
    return bytes(out)


def loads(data: bytes) -> Any:
    """The value that `dumps` turned into `data`; `CommError` if these bytes are not from it."""
    reader = _Reader(data)
    try:
        value = reader.value(0)
        if reader.left:
            raise ValueError(f"{reader.left} bytes too many")
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError, struct.error) as error:
        raise CommError(f"{len(data)} bytes are not valid plain data: {str(error)[:200]}") from error
    return value


def _put(out: bytearray, value: Any, depth: int) -> None:
    kind = type(value)
    if depth > DEEPEST:
        raise NotPlain(kind, f" inside {DEEPEST} others")
    if value is None or kind is bool:
        out += _CONSTANTS[value]
    elif kind is int:
        _put_bytes(out, b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    elif kind is float:
        out += b"f" + struct.pack("<d", value)
    elif kind is complex:
        out += b"c" + struct.pack("<dd", value.real, value.imag)
    elif kind is str:
        _put_bytes(out, b"s", value.encode("utf-8", "surrogatepass"))
    elif kind is bytes:
        _put_bytes(out, b"b", value)
    elif kind is list and set(map(type, value)) == {int} and -(1 << 63) <= min(value) <= max(value) < 1 << 63:
        _put_bytes(out, b"q", struct.pack(f"<{len(value)}q", *value))  # such as indices, of which there may be many
    elif kind in _LETTERS:
        _put_items(out, _LETTERS[kind], len(value), value, depth)
    elif kind is dict:
        _put_items(out, b"d", len(value), (each for item in value.items() for each in item), depth)
    elif kind is torch.dtype:
        _put_bytes(out, b"y", str(value).encode())
    elif kind is torch.device:
        _put_bytes(out, b"v", str(value).encode())
    elif kind is Tensor:
        _put_tensor(out, value)
    elif kind.__module__ == "numpy":
        _put_numpy(out, value)
    else:
        raise NotPlain(kind)


def _put_size(out: bytearray, size: int) -> None:
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)


def _put_bytes(out: bytearray, letter: bytes, data: bytes | bytearray) -> None:
    out += letter
    _put_size(out, len(data))
    out += data


def _put_items(out: bytearray, letter: bytes, count: int, items: Iterable[Any], depth: int) -> None:
    out += letter
    _put_size(out, count)
    for item in items:
        _put(out, item, depth + 1)


def _put_array(out: bytearray, letter: bytes, name: str, shape: tuple[int, ...], data: bytes | bytearray) -> None:
    _put_bytes(out, letter, name.encode())
    _put_bytes(out, b"", struct.pack(f"<{len(shape)}q", *shape))
    _put_bytes(out, b"", data)


def _put_tensor(out: bytearray, tensor: Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise NotPlain(Tensor, f" unless it is dense and on the CPU; this one is {tensor.layout} on {tensor.device}")
    if not _OF_TENSORS.fullmatch(str(tensor.dtype)) or tensor.dim() > MOST_DIMENSIONS:
        raise NotPlain(Tensor, f" if it is of {tensor.dtype} with {tensor.dim()} dimensions")
    data = bytearray(tensor.numel() * tensor.element_size())
    if data:
        torch.frombuffer(data, dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    _put_array(out, b"x", str(tensor.dtype), tuple(tensor.shape), data)


def _put_numpy(out: bytearray, value: Any) -> None:
    import numpy

    kind = type(value)
    if not issubclass(kind, numpy.generic) and kind is not numpy.ndarray:
        raise NotPlain(kind)
    if value.dtype.char not in NUMBERS or not value.dtype.isnative or value.ndim > MOST_DIMENSIONS:
        raise NotPlain(kind, f" if it is of {value.dtype!r} with {value.ndim} dimensions")
    _put_array(out, b"a" if kind is numpy.ndarray else b"n", value.dtype.char, value.shape, value.tobytes())


class _Reader:
    """Reads from `data`, which may hold anything."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.left = len(data)

    def value(self, depth: int) -> Any:
        if depth > DEEPEST:
            raise ValueError(f"more than {DEEPEST} containers inside each other")
        letter = self._take(1)
        for constant, its in _CONSTANTS.items():
            if letter == its:
                return constant
        if letter in _CONTAINERS:
            return _CONTAINERS[letter]([self.value(depth + 1) for _ in range(self._size())])
        if letter == b"d":
            return {self.value(depth + 1): self.value(depth + 1) for _ in range(self._size())}
        if letter == b"f":
            return struct.unpack("<d", self._take(8))[0]
        if letter == b"c":
            return complex(*struct.unpack("<dd", self._take(16)))
        data = self._take(self._size())
        if letter == b"i":
            return int.from_bytes(data, "little", signed=True)
        if letter == b"s":
            return data.decode("utf-8", "surrogatepass")
        if letter == b"b":
            return data
        if letter == b"q":
            return list(struct.unpack(f"<{len(data) // 8}q", data))
        if letter == b"y":
            return _DTYPES[data.decode()]
        if letter == b"v":
            return torch.device(data.decode())
        if letter == b"x" and _OF_TENSORS.fullmatch(data.decode()):
            return self._tensor(_DTYPES[data.decode()])
        if letter in (b"a", b"n") and data.decode() in tuple(NUMBERS):
            return self._numpy(data.decode(), whole=letter == b"a")
        raise ValueError(f"no value begins with {letter!r}")

    def _take(self, count: int) -> bytes:
        if count > self.left:
            raise ValueError(f"{count} bytes expected, {self.left} are left")
        start = len(self._data) - self.left
        self.left -= count
        return self._data[start : start + count]

    def _size(self) -> int:
        size = shift = 0
        while shift < 64:
            byte = self._take(1)[0]
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        if size > self.left:  # every item takes at least one byte
            raise ValueError(f"{size} bytes or items expected, {self.left} bytes are left")
        return size

    def _shape_and_data(self, itemsize: int) -> tuple[tuple[int, ...], bytes]:
        sizes = self._take(self._size())
        shape = struct.unpack(f"<{len(sizes) // 8}q", sizes)
        data = self._take(self._size())
        if len(shape) > MOST_DIMENSIONS or min(shape, default=0) < 0 or math.prod(shape) * itemsize != len(data):
            raise ValueError(f"{len(data)} bytes for shape {shape} of {itemsize} bytes each")
        return shape, data

    def _tensor(self, dtype: torch.dtype) -> Tensor:
        shape, data = self._shape_and_data(dtype.itemsize)
        if dtype is torch.bool and data.strip(b"\0\1"):
            raise ValueError("a truth value that is neither 0 nor 1")
        tensor = torch.empty(shape, dtype=dtype)
        if data:
            tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return tensor

    def _numpy(self, char: str, whole: bool) -> Any:
        import numpy

        dtype = numpy.dtype(char)
        shape, data = self._shape_and_data(dtype.itemsize)
        if char == "?" and data.strip(b"\0\1"):
            raise ValueError("a truth value that is neither 0 nor 1")
        array = numpy.ndarray(shape, dtype, buffer=data).copy()
        return array if whole else array.reshape(())[()]
