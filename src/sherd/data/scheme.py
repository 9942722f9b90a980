"""The interface of a sharding scheme."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from sherd.comm import Communicator

Take = Callable[[Callable[[], Any]], tuple[Any, float, int]]
"""take(draw): the next batch of an epoch, its weight and how many samples were loaded for it. StopIteration at the end.

`draw` gives what torch's own iterator yields."""


class ShardingScheme(ABC):
    """How one loader is sharded."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def indices(self, own: Iterable[Any], ahead: int) -> Iterable[Any]:
        """What torch's iterator draws indices from instead of the user's `own` sampler.

        It draws the indices of `ahead` batches before it is asked for the first batch.
        """
        return own

    @abstractmethod
    def epoch(self, sampling: Any) -> Take:
        """Begin an epoch, in which torch's iterator draws indices from `sampling`."""

    def length(self, own: int) -> int:
        """How many batches a rank gets where torch's loader would yield `own`."""
        return own

    def seed(self, drawn: int) -> int:
        """The seed of this rank's workers, given the one torch drew, which may be the same on every rank.

        torch adds the worker's number to it, so the seeds of ranks must not be consecutive.
        """
        digest = hashlib.blake2b(f"{drawn} {self._comm.rank}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def length(thing: Any) -> int:
    """`len(thing)`, or -1 if it has none."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return -1
