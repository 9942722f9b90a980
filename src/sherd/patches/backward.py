"""`torch.autograd.backward`: where a backward begins and ends.

A *round* is one outermost backward. Torch tells nobody when it is over: a callback queued with the autograd engine
fires at the end of an *inner* backward where there is one (reentrant checkpointing). So `torch.autograd.backward`,
which `Tensor.backward` and reentrant checkpointing both call, is wrapped. A compiled function that calls it is cut
there: what happens around a backward is not for a compiler to trace.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from sherd.patches.replacing import Replacements

RELIES_ON = {
    "torch.autograd:backward": "tensors grad_tensors retain_graph create_graph grad_variables inputs",
    "torch.compiler:disable": "fn recursive reason",
}


class Listener(Protocol):
    """Who wants to know."""

    def begin_round(self) -> None:
        """An outermost backward is about to start."""

    def end_round(self) -> None:
        """It is over; every gradient hook has been called."""

    def abandon_round(self, error: BaseException) -> None:
        """It failed, perhaps before it began."""


Recorder = Callable[[Any], AbstractContextManager[Any]]
"""record(roots): what an outermost backward runs in."""

# In the order in which they were added, which is the same on all ranks: what they do at the end is collective.
_listeners: list[weakref.ref[Listener]] = []
_depth = 0
_record: Recorder = nullcontext
_replacements = Replacements()


def install() -> None:
    """Wrap it."""
    _replacements.replace(torch.autograd, "backward", _wrapped)


def uninstall() -> None:
    """Give torch its own back. Listeners hear nothing any more."""
    _replacements.restore()


def record_with(record: Recorder) -> None:
    """Run every outermost backward inside `record(its roots)` from now on."""
    global _record
    _record = record


def listen(listener: Listener) -> None:
    """Tell `listener` about every outermost backward of this process for as long as it lives."""
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


def _wrapped(original: Callable[..., None]) -> Callable[..., None]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(original)
    def backward(*args: Any, **options: Any) -> None:
        if _depth:
            original(*args, **options)
            return
        with _record(args[0] if args else options.get("tensors")):
            outermost(*args, **options)

    def outermost(*args: Any, **options: Any) -> None:
        # One counter for the process: an inner backward may run in a thread of the autograd engine.
        global _depth
        _depth += 1
        try:
            for listener in _alive():
                listener.begin_round()
            original(*args, **options)
        except BaseException as error:
            for listener in _alive():
                listener.abandon_round(error)
            raise
        finally:
            _depth -= 1
        for listener in _alive():
            listener.end_round()

    return backward  # type: ignore[no-any-return]
