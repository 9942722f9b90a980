"""Handles: operations that are under way."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sherd.observe import monitor
from sherd.observe.phases import COMMUNICATION

EMPTY = torch.empty(0)
"""The result of a barrier."""


class Handle(ABC):
    """An operation under way. `wait()` completes it; do not touch its output before that, nor its input before it is
    released."""

    __slots__ = ("result",)

    #: What `wait()` returns; the communicator sets it before it hands the handle out.
    result: Tensor
    #: Whether `wait()` will return at once, as far as is known without checking.
    finished: bool = False

    @abstractmethod
    def wait(self) -> Tensor:
        """Complete the operation and return its result (for a barrier, an empty tensor). May be called again."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait()` would return at once. Moves the operation on as far as possible without waiting."""

    def release(self) -> None:
        """Wait until the input may be used for something else, which can be before the operation is complete."""
        self.wait()


class Done(Handle):
    """An operation that was complete when it was issued."""

    __slots__ = ()

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result

    def done(self) -> bool:
        return True


class CopyBack(Handle):
    """An operation that writes to a contiguous stand-in for the caller's output, which is then copied there."""

    __slots__ = ("_flat", "_inner")

    def __init__(self, inner: Handle, flat: Tensor, result: Tensor) -> None:
        self._inner: Handle | None = inner
        self._flat = flat
        inner.result = flat
        self.result = result

    def wait(self) -> Tensor:
        if self._inner is not None:
            self._inner.wait()
            self.result.detach().copy_(self._flat.view(self.result.shape))
            self._inner = None
        return self.result

    def done(self) -> bool:
        return self._inner is None or self._inner.done()


class Together(Handle):
    """Several operations as one, whose result is `result`."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Handle], result: Tensor) -> None:
        self._parts = parts
        self.result = result

    def wait(self) -> Tensor:
        for part in self._parts:
            part.wait()
        return self.result

    def done(self) -> bool:
        return all(part.done() for part in self._parts)


# ---------------------------------------------------------------- time


def time_waits() -> None:
    """From now on, count the time that a run's thread spends in `wait()` and `release()` as communication.

    Only for runs that are recorded, as it costs one more call for each wait. It patches the classes of handles for the
    life of the process: when no run is recorded any more, a wait still has one more test for None.
    """
    kinds = Handle.__subclasses__()
    for kind in kinds:
        kinds += kind.__subclasses__()
        for name in ("wait", "release"):
            method = vars(kind).get(name)
            if method is not None and kind is not Done and not hasattr(method, "__sherd__"):
                setattr(kind, name, _timed(method))


def _timed(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(method)
    def timed(self: Any) -> Any:
        run = monitor.current
        if run is None or self.finished or run.clock.phase == COMMUNICATION:  # the last: inside another wait
            return method(self)
        before = run.clock.enter(COMMUNICATION)
        try:
            return method(self)
        finally:
            run.clock.enter(before)

    timed.__sherd__ = True  # type: ignore[attr-defined]
    return timed
