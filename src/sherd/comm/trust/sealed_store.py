"""A store whose values are sealed: for gloo, which trusts whatever it finds there.

gloo writes the addresses of its ranks into a store and reads those of the others without checking them: bytes from a
stranger end in a segmentation fault. Over this store it finds what a rank of this job wrote under that very key, or
gets an error.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import Store

from sherd.comm.trust.seal import Seal
from sherd.errors import CommError


class SealedStore(Store):
    """`store`, with an HMAC by `seal` around each value. Keep it for as long as torch uses it: torch keeps
    only the C++ half of it alive.

    Numbers that the server counts (`add`) have no HMAC: whoever reaches the store can change them. There is no
    `clone`, whose Python half nothing would keep alive: clone `underlying_store`.
    """

    def __init__(self, store: Store, seal: Seal) -> None:
        super().__init__()
        self.underlying_store = store  # by this name, as a PrefixStore has it
        self._seal = seal.derived("store")

    # torch declares values to be strings, and hands over bytes; a seal is no text.
    def set(self, key: str, value: Any) -> None:
        self.underlying_store.set(key, self._sealed(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        value = self._seal.opened(key, self.underlying_store.get(key))
        if value is None:
            raise CommError(
                f"the value of {key!r} in the store of this job was written by someone else: it has no seal of the "
                "job's token. Keep the store's port where only this job's machines can reach it"
            )
        return value

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """As torch's: returns the value afterwards. An empty `expected` is for a key that does not exist yet."""
        before = self._sealed(key, expected) if expected else b""
        self.underlying_store.compare_set(key, before, self._sealed(key, desired))  # type: ignore[arg-type]
        return self.get(key) if self.underlying_store.check([key]) else _bytes(expected)

    def add(self, key: str, amount: int) -> int:
        return self.underlying_store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.underlying_store.check(keys)

    def delete_key(self, key: str) -> bool:
        return self.underlying_store.delete_key(key)

    def num_keys(self) -> int:
        return self.underlying_store.num_keys()

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - what torch's C++ calls them

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self.underlying_store.wait(keys)
        else:
            self.underlying_store.wait(keys, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self.underlying_store.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return False

    def _sealed(self, key: str, value: Any) -> bytes:
        return self._seal.sealed(key, _bytes(value))


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
