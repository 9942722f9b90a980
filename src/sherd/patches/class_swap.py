"""Objects of the user's that get methods of ours: their class is exchanged for a subclass of it with the same name, so
that they stay the objects that everybody holds, and `isinstance` still says what they are."""

from __future__ import annotations

import functools
from typing import Any


def swap_class(thing: Any, methods: Any) -> None:
    """Put `methods` before those of the class of `thing`."""
    kind: Any = type(thing)
    thing.__class__ = subclass(methods, kind)


@functools.cache
def subclass(methods: Any, kind: Any) -> Any:
    """`kind` with other methods, under its own name."""
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (methods, kind), own)
