"""Where a backward begins and ends.

A *round* is one outermost backward. Torch tells nobody when it is over: a callback queued with the autograd engine
fires at the end of an *inner* backward where there is one (reentrant checkpointing). So `torch.autograd.backward`,
which `Tensor.backward` and reentrant checkpointing both call, is wrapped once per process, by the first listener. A
compiled function that calls it is cut there: what happens around a backward is not for a compiler to trace.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from sherd.engine.scaling import unscaled
from sherd.observe import monitor


class Listener(Protocol):
    """Who wants to know."""

    def begin_round(self) -> None:
        """An outermost backward is about to start."""

    def end_round(self) -> None:
        """It is over; every gradient hook has been called."""

    def abandon_round(self, error: BaseException) -> None:
        """It failed."""


# In the order in which they were added, which is the same on all ranks: what they do at the end is collective.
_listeners: list[weakref.ref[Listener]] = []
_depth = 0


def listen(listener: Listener) -> None:
    """Tell `listener` about every outermost backward of this process for as long as it lives."""
    if not hasattr(torch.autograd.backward, "__sherd__"):
        _wrap()
    _listeners.append(weakref.ref(listener))


def forget(listener: Listener) -> None:
    """Tell it no more."""
    _listeners[:] = [reference for reference in _listeners if reference() is not listener]


def under_way() -> bool:
    """Whether a backward that listeners were told of is running."""
    return _depth > 0


def _alive() -> Iterator[Listener]:
    for reference in list(_listeners):
        listener = reference()
        if listener is None:
            _listeners.remove(reference)
        else:
            yield listener


def _losses(roots: Any) -> list[Tensor]:
    """What a backward begins at, as far as it is numbers at hand."""
    if not isinstance(roots, (list, tuple)):
        roots = (roots,)
    # On an accelerator a value would have to be waited for; and there are other kinds of roots than tensors.
    here = (root for root in roots if type(root) is Tensor and root.device.type == "cpu" and root.numel() == 1)
    return [root for root in here if not root.is_complex()]


def _wrap() -> None:
    original = torch.autograd.backward

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(original)
    def backward(*args: Any, **options: Any) -> None:
        if _depth:
            original(*args, **options)
            return
        run = monitor.current
        if run is not None:
            run.begin_backward(unscaled(_losses(args[0] if args else options.get("tensors")), run))
        try:
            outermost(*args, **options)
        finally:
            if run is not None:
                run.end_backward()

    def outermost(*args: Any, **options: Any) -> None:
        # One counter for the process: an inner backward may run in a thread of the autograd engine.
        global _depth
        for listener in _alive():
            listener.begin_round()
        _depth += 1
        try:
            original(*args, **options)
        except BaseException as error:
            for listener in _alive():
                listener.abandon_round(error)
            raise
        finally:
            _depth -= 1
        for listener in _alive():
            listener.end_round()

    backward.__sherd__ = True
    torch.autograd.backward = backward
