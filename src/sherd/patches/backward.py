"""`torch.autograd.backward`: where a backward begins and ends.

A *round* is one outermost backward. Torch does not report when it ends: a callback queued with the autograd engine
fires at the end of an *inner* backward if there is one (reentrant checkpointing). So `torch.autograd.backward`, which
`Tensor.backward` and reentrant checkpointing both call, is wrapped. It breaks the graph of a compiled function: the
compiler must not trace what happens around a backward. A loss scale enters here too, at the roots.
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
    """Is notified of every round."""

    def begin_round(self) -> None:
        """An outermost backward is about to start."""

    def end_round(self) -> None:
        """It has ended; every gradient hook has been called."""

    def abandon_round(self, error: BaseException) -> None:
        """It failed, perhaps before it began."""


Recorder = Callable[[Any], AbstractContextManager[Any]]
"""record(roots): the context in which an outermost backward runs."""

Scaling = Callable[[Any, Any, bool], AbstractContextManager[Any]]
"""scaling(roots, gradients, outermost): the context in which any backward runs, from the gradients that it gives."""

_ARGUMENTS = ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")

# In the order in which they were added, the same on all ranks: what they do at the end is collective.
_listeners: list[weakref.ref[Listener]] = []
_depth = 0
_record: Recorder = nullcontext
_scaling: Scaling | None = None
_replacements = Replacements()


def install() -> None:
    """Wrap `torch.autograd.backward`."""
    _replacements.replace(torch.autograd, "backward", _wrapped)


uninstall = _replacements.restore


def record_with(record: Recorder) -> None:
    """Run every outermost backward inside `record(its roots)` from now on."""
    global _record
    _record = record


def scale_with(scaling: Scaling | None) -> None:
    """Run every backward inside `scaling(...)` from now on."""
    global _scaling
    _scaling = scaling


def listen(listener: Listener) -> None:
    """Notify `listener` of every outermost backward of this process for as long as it lives."""
    _listeners.append(weakref.ref(listener))


def forget(listener: Listener) -> bool:
    """Stop notifying `listener`; return whether it was notified."""
    others = [reference for reference in _listeners if reference() is not listener]
    found = len(others) < len(_listeners)
    _listeners[:] = others
    return found


def under_way() -> bool:
    """Whether a backward is running of which listeners were notified."""
    return _depth > 0


def _alive() -> Iterator[Listener]:
    for reference in list(_listeners):
        listener = reference()
        if listener is None:
            _listeners.remove(reference)
        else:
            yield listener


def _end_all() -> None:
    """Tell every listener that the backward is over, also after one has failed at that: the others may go on."""
    failure: BaseException | None = None
    for listener in _alive():
        try:
            if failure is None:
                listener.end_round()
            else:
                listener.abandon_round(failure)
        except BaseException as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _wrapped(original: Callable[..., None]) -> Callable[..., None]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(original)
    def backward(*args: Any, **options: Any) -> None:
        if _depth:
            scaled(False, *args, **options)
            return
        with _record(args[0] if args else options.get("tensors")):
            outermost(*args, **options)

    def scaled(is_outermost: bool, *args: Any, **options: Any) -> None:
        if _scaling is None:
            original(*args, **options)
            return
        call = {**dict(zip(_ARGUMENTS, args, strict=False)), **options}
        old = "grad_variables" if call.get("grad_variables") is not None else "grad_tensors"
        with _scaling(call.get("tensors"), call.get(old), is_outermost) as gradients:
            original(**{**call, old: gradients})

    def outermost(*args: Any, **options: Any) -> None:
        # One counter for the process: an inner backward may run in a thread of the autograd engine.
        global _depth
        _depth += 1
        try:
            for listener in _alive():
                listener.begin_round()
            scaled(True, *args, **options)
        except BaseException as error:
            for listener in _alive():
                listener.abandon_round(error)
            raise
        finally:
            _depth -= 1
        _end_all()

    return backward  # type: ignore[no-any-return]
