"""Keys of groups: which values may be one, and which rank reduces its group."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from sherd.errors import ConfigError

Key = Any


def checked(key: Any) -> Key:
    """The key, as a plain value; numbers of numpy become Python's."""
    if type(key) is tuple:
        return tuple(map(checked, key))
    if type(key).__module__ == "numpy" and hasattr(key, "item") and not getattr(key, "ndim", 0):
        key = key.item()
    if key is None or type(key) is bool:
        return key
    if isinstance(key, str):  # of a subclass, such as an enum, its value: only plain data is sent
        return str.__str__(key)
    if isinstance(key, int):
        return int(key)
    if isinstance(key, float) and not math.isnan(key):
        return float(key)
    if isinstance(key, bytes):
        return bytes(key)
    found = "NaN, which equals nothing" if isinstance(key, float) else f"a {type(key).__name__}"
    fix = "; write key=lambda item: ....item()" if hasattr(key, "item") else ""
    raise ConfigError(
        f"the key of an item is {found}; a key is a string, a number, bytes, None, or a tuple of those{fix}"
    )


def owner(key: Key, world: int) -> int:
    """The rank that reduces the group of a key: the same for keys that are equal, in every process."""
    return int.from_bytes(hashlib.blake2b(_bytes(key), digest_size=8).digest(), "little") % world


def _bytes(key: Key) -> bytes:
    if isinstance(key, tuple):
        inside = [_bytes(each) for each in key]
        return b"t" + b"".join(len(each).to_bytes(8, "little") + each for each in inside)
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes):
        return b"b" + key
    # 1, 1.0 and True are one key of a dict. Python's hash of numbers is the same for them, and in every process.
    return b"n" if key is None else b"#" + str(hash(key)).encode()
