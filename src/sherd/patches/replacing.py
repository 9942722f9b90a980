"""How attributes of torch are replaced and restored, and how the user's objects get our methods."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_MARK = "__sherd__"
"""On a replacement: the original attribute, which the owner may have inherited, and the replacement itself."""
_ABSENT: Any = object()


class Replacements:
    """What one patch has replaced. It keeps no user class alive: the original is stored with its replacement."""

    def __init__(self) -> None:
        self._places: list[tuple[weakref.ref[Any], str]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put `make(original)` in place of `owner.name`, unless it is already replaced.

        A later wrapper of ours made with `functools.wraps` has the mark too.
        """
        original = getattr(owner, name)
        if hasattr(original, _MARK):
            return
        made = make(original)
        setattr(_function(made), _MARK, (vars(owner).get(name, _ABSENT), made))
        setattr(owner, name, made)
        self._places.append((weakref.ref(owner), name))

    def restore(self) -> None:
        """Restore the originals. Where other code has replaced or wrapped ours since, its attribute stays."""
        while self._places:
            reference, name = self._places.pop()
            owner = reference()
            now = None if owner is None else vars(owner).get(name)
            before, made = getattr(_function(now), _MARK, (None, None))
            if made is None or made is not now:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def _function(attribute: Any) -> Any:
    """The function inside a static or class method."""
    return getattr(attribute, "__func__", attribute)


def with_subclasses(kind: Any) -> Iterator[Any]:
    """A class and all that are derived from it."""
    yield kind
    for each in kind.__subclasses__():
        yield from with_subclasses(each)


def swap_class(thing: Any, methods: Any) -> None:
    """Put `methods` before those of the class of `thing`.

    Its class becomes a subclass of the same name, so that existing references and `isinstance` stay valid.
    """
    kind: Any = type(thing)
    thing.__class__ = subclass(methods, kind)


@functools.cache
def subclass(methods: Any, kind: Any) -> Any:
    """`kind` with other methods, under its own name."""
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (methods, kind), own)
