"""A failure in one part of a cluster communicator is the end of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sherd.comm.closing import unusable
from sherd.errors import CommError


class Part(Protocol):
    """A communicator that can tell its other ranks of a failure they cannot see."""

    def fail(self, error: CommError) -> None: ...


class FailureState:
    """Why a communicator can no longer be used, and the parts that have to be told."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._broken: str | None = None

    def check(self) -> None:
        if self._broken is not None:
            raise unusable(self._broken)

    def close(self) -> None:
        self._broken = self._broken or "it was closed"

    def tell(self, error: BaseException) -> None:
        """Tell the ranks that wait in other parts what went wrong."""
        if self._broken is None:
            fault = error if isinstance(error, CommError) else CommError(f"{type(error).__name__}: {error}")
            self._broken = str(fault)
            for part in self._parts:
                part.fail(fault)
