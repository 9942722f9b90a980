"""What a way of sharding is."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from sherd.comm import Communicator


class Turn(Protocol):
    """One epoch of one loader."""

    def take(self, draw: Callable[[], Any]) -> tuple[Any, float, int]:
        """The next batch, its share and how many samples were loaded for it; `draw` gives what torch's own iterator
        yields. StopIteration at the end."""


class Way(ABC):
    """How one loader is sharded."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def indices(self, own: Iterable[Any], ahead: int) -> Iterable[Any]:
        """What torch's iterator draws indices from instead of the user's `own` sampler.

        It draws those of `ahead` batches before it is asked for the first.
        """
        return own

    @abstractmethod
    def turn(self, sampling: Any) -> Turn:
        """An epoch begins; torch's iterator draws indices from `sampling` in it."""

    def length(self, own: int) -> int:
        """How many batches a rank gets where torch's loader would give `own`."""
        return own

    def seed(self, drawn: int) -> int:
        """The seed of this rank's workers, where torch drew one that ranks may have in common.

        torch adds the worker's number, so seeds of ranks must not lie side by side.
        """
        digest = hashlib.blake2b(f"{drawn} {self._comm.rank}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def length(thing: Any) -> int:
    """`len(thing)`, or -1 if it has none."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return -1
