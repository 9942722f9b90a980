"""Names of strategies: a strategy is added by one file that registers itself, and nothing else asks which it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sherd.errors import ConfigError, nearest
from sherd.strategies.base import Strategy

Builder = TypeVar("Builder", bound=Callable[[], Strategy])

_BUILDERS: dict[str, Callable[[], Strategy]] = {}


def register(name: str) -> Callable[[Builder], Builder]:
    """Decorate a `Strategy` class, or a function that builds one, so that its users can write `name`.

    A function gives a class a second name with other defaults. A class without a `name` of its own gets this one.
    """

    def add(builder: Builder) -> Builder:
        if not name:
            raise ConfigError(f"a strategy needs a name; found {name!r} for {builder!r}")
        if name in _BUILDERS:
            raise ConfigError(f"the strategy {name!r} is {_BUILDERS[name]!r} already; register {builder!r} by another")
        if isinstance(builder, type) and "name" not in vars(builder):
            builder.name = name  # type: ignore[attr-defined]
        _BUILDERS[name] = builder
        return builder

    return add


def resolve(spec: str | Strategy) -> Strategy:
    """The strategy that a user meant: a name builds it with its defaults, an object is taken as it is."""
    if isinstance(spec, Strategy):
        return spec
    if isinstance(spec, str):
        return _named(spec)
    raise ConfigError(_not_a_strategy(spec))


def names() -> tuple[str, ...]:
    """Every registered name, sorted."""
    return tuple(sorted(_BUILDERS))


def _named(name: str) -> Strategy:
    builder = _BUILDERS.get(name)
    if builder is None:
        found = nearest(name, _BUILDERS) if _BUILDERS else "none is registered"
        raise ConfigError(f"unknown strategy {name!r}; {found}")
    return builder()


def _not_a_strategy(spec: object) -> str:
    if isinstance(spec, type) and issubclass(spec, Strategy):
        return f"strategy={spec.__name__} is a class; write an object of it: strategy={spec.__name__}()"
    example = min(_BUILDERS, default="ddp")
    expected = f"write a name such as strategy={example!r}, or a Strategy object with options"
    return f"strategy={spec!r} is of type {type(spec).__name__}; {expected}"
